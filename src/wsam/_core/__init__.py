"""The optimizer's core: the mathematics of a step and the state around it. Needs torch alone.

A step, in the order to read:

    mix                 linear combinations of g0 and g1 - g0
    param_blocks        parameters in blocks, shards, and sums over ranks
    step_state          the phases of a step, and errors about a call in the wrong phase
    step                perturb, restore, combine, clip, apply

Variants of a step:

    lean                the base steps between the passes
    grad_accumulator    a perturbation for each micro-batch
    local_gradients     a perturbation for each rank
    sample_selection    a second pass on some samples
    preconditioners     a sharpness term that is divided by the base's denominator

The model and the closure during a step:

    norm_stats, rng     running statistics and generators, which the second pass must not change
    losses, grad_scaler what closures return, and gradients that a GradScaler has scaled

Between steps:

    option_checks       which bases and options are supported
    param_groups        hyperparameters of each group; `schedule_base`: those that change
    memory              tensors that a method keeps
    state_dict          saving and loading

Tools: `tensor_ops`, `pytree`, `validation`, `framework_checks`.
"""

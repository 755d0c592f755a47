"""The optimizer's core: the mathematics of a step and the state around it. Needs torch alone."""

"""Tasks that run in the processes of the tests of torch.distributed."""

"""What runs inside the processes that the tests of torch.distributed start."""

"""Long Range Arena: ListOps and CIFAR-10 by pixel."""

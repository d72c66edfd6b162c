"""What people run: the `paceline` command, the benchmarks, the network lab."""

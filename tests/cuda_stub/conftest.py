"""Only test files are collected here: importing the scripts and the stub device replaces parts of PyTorch."""

collect_ignore_glob = ["stub_device/*", "[!t]*.py"]

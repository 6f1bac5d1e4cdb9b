"""Isolates fzero from private PyTorch names and from settings that belong to the whole process.

Every private name of a PyTorch module that fzero uses is wrapped in `compat.py`, and every wrapper
is tested against each supported release. Private attributes of PyTorch objects, such as
`tensor._version`, are also read elsewhere. This folder imports only `_utils/` and `errors.py`.

| file | what it does |
|---|---|
| `compat.py` | wraps private PyTorch functions and hides the differences between supported releases |
| `inductor_folder.py` | chooses safe folders for Inductor's files and for the temporary files of compilers |
| `allocator.py` | tunes glibc's allocator: keeps freed memory for reuse, or returns it to the system |
"""

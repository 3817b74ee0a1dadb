"""Confines a process to itself, with no privilege needed: what it may not do fails with PermissionError.

seccomp.py    no sockets, no new processes, no signals to others, no ptrace, mount, io_uring, keys, namespaces
landlock.py   no writes but below one folder        layers.py   both, the limits (rlimits), capabilities dropped; `apply`

Stopped: network, forks, writes and changes of mode outside the folder, memory, CPU time, file size, other processes.
Not stopped: reading any file that the user may read (and the environment), filling the disk with many files below
the size limit, side channels, faults of the kernel. Code that must not read secrets belongs in a container.
"""

"""A seccomp filter (BPF, linux/seccomp.h) that refuses system calls; x86_64 and aarch64.

Refused calls fail with EPERM. clone3 fails with ENOSYS, for its flags lie in memory and libc then uses clone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL = 0x80000000
_CLONE_THREAD = 0x00010000
_X32 = 0x40000000
_NR, _ARCH, _ARG0 = 0, 4, 16
_SET_MODE_FILTER, _TSYNC = 1, 1

ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
# Numbers from 424 on are the same everywhere: pidfd_send_signal, io_uring_setup, open_tree, move_mount, fsopen, pidfd_getfd.
_NEW = (424, 425, 428, 429, 430, 438)
_ALWAYS = {
    # ptrace mount umount2 pivot_root chroot unshare setns bpf perf_event_open process_vm_readv/writev
    # add_key request_key keyctl open_by_handle_at userfaultfd kcmp reboot kexec_load init_module finit_module tkill
    "x86_64": (
        *(101, 165, 166, 155, 161, 272, 308, 321, 298, 310, 311),
        *(248, 249, 250, 304, 323, 312, 169, 246, 175, 313, 200),
    ),
    "aarch64": (
        *(117, 40, 39, 41, 51, 97, 268, 280, 241, 270, 271),
        *(217, 218, 219, 265, 282, 272, 142, 104, 105, 273, 130),
    ),
}
# socket connect bind listen
_NETWORK = {"x86_64": (41, 42, 49, 50), "aarch64": (198, 203, 200, 201)}
# chmod fchmod fchmodat chown fchown lchown fchownat setxattr lsetxattr fsetxattr, and fchmodat2
_MODES = {
    "x86_64": (90, 91, 268, 92, 93, 94, 260, 188, 189, 190, 452),
    "aarch64": (52, 53, 54, 55, 5, 6, 7, 452),
}
_CLONE = {"x86_64": 56, "aarch64": 220}
_FORKS = {"x86_64": (57, 58), "aarch64": ()}
_SIGNALS = {"x86_64": (62, 234, 129, 297), "aarch64": (129, 131, 138, 240)}
"""kill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo: the first argument is the process."""
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
"""The same, and 0 is the caller. A low limit of CPU time or memory ends a process as well as a signal does."""


def build(arch: str, pid: int, *, network: bool, processes: bool, modes: bool) -> bytes:
    """The filter's instructions for the process `pid`; what is True is left alone."""
    code = [_op(_LD, _ARCH), _op(_JEQ, ARCHES[arch], 1, 0), _op(_RET, _KILL), _op(_LD, _NR)]
    if arch == "x86_64":
        code += [_op(_JGE, _X32, 0, 1), _op(_RET, _ERRNO | errno.ENOSYS)]
    refused = [*_ALWAYS[arch], *_NEW]
    if not network:
        refused += _NETWORK[arch]
    if not modes:
        refused += _MODES[arch]
    if not processes:
        refused += _FORKS[arch]
        code += _refuse(435, errno.ENOSYS)
        code += [_op(_JEQ, _CLONE[arch], 0, 4), _op(_LD, _ARG0), _op(_JSET, _CLONE_THREAD, 1, 0)]
        code += [_op(_RET, _ERRNO | errno.EPERM), _op(_RET, _ALLOW)]
        for number in _SIGNALS[arch]:
            code += [_op(_JEQ, number, 0, 4), _op(_LD, _ARG0), _op(_JEQ, pid, 1, 0)]
            code += [_op(_RET, _ERRNO | errno.EPERM), _op(_RET, _ALLOW)]
        code += [_op(_JEQ, _PRLIMIT[arch], 0, 5), _op(_LD, _ARG0), _op(_JEQ, pid, 2, 0), _op(_JEQ, 0, 1, 0)]
        code += [_op(_RET, _ERRNO | errno.EPERM), _op(_RET, _ALLOW)]
    for number in refused:
        code += _refuse(number, errno.EPERM)
    return b"".join([*code, _op(_RET, _ALLOW)])


def install(*, network: bool, processes: bool, modes: bool) -> None:
    """Filter this process, all its threads and children, for ever. Needs no_new_privs. OSError where it cannot."""
    arch = platform.machine()
    if arch not in ARCHES:
        raise OSError(errno.ENOTSUP, f"no seccomp filter for {arch}")
    code = build(arch, os.getpid(), network=network, processes=processes, modes=modes)
    libc = ctypes.CDLL(None, use_errno=True)
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(instructions))
    if libc.syscall(_SECCOMP[arch], _SET_MODE_FILTER, _TSYNC, ctypes.c_char_p(program)) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def _refuse(number: int, error: int) -> list[bytes]:
    return [_op(_JEQ, number, 0, 1), _op(_RET, _ERRNO | error)]


def _op(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
    return struct.pack("HBBI", code, jt, jf, k)

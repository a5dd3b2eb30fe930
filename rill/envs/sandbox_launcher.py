"""The inside of the sandbox: fences itself in, then runs the program it was given. Started by sandbox.py only.

Uses the standard library alone and is started with -I -S, so that it is up in some milliseconds. Order matters:
namespaces first (they need privileges), then Landlock, then the loss of privileges, then limits, then the program.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import resource
import signal
import struct
import sys

CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
CLONE_THREAD, CLONE3 = 0x00010000, 435
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
CAPABILITY_VERSION_3 = 0x20080522
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_RULE_PATH_BENEATH = 1
# Everything that changes the file system: write, remove, make, refer, truncate. Reading and running stay free.
LANDLOCK_WRITES = 0b111_1111_1111_0010
FIRST_SANDBOX_UID, NUM_SANDBOX_UIDS = 200_000, 50_000

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    report = int(sys.argv[1])
    fences = separate()
    if "processes" in fences:
        run_as_first_process()
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if forbid_writing(job["folder"]):
        fences.append("files")
    if os.geteuid() == 0:
        drop_privileges(job["folder"], fences)
    set_limits(job["limits"], own_user="user" in fences)
    if job["limits"]["num_processes"] <= 1 and forbid_processes():
        fences.append("forks")
    os.environ["RILL_FENCES"] = " ".join(fences)
    sys.stdin = io.TextIOWrapper(io.BytesIO(job["stdin"].encode()), encoding="utf-8")
    run_program(job, report)


def separate() -> list[str]:
    """New namespaces, as many as the kernel gives."""
    as_root = os.geteuid() == 0
    user = 0 if as_root else CLONE_NEWUSER
    if libc.unshare(user | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWPID) == 0:
        return ["network", "processes"]
    return ["network"] if libc.unshare(user | CLONE_NEWNET) == 0 else []


def run_as_first_process() -> None:
    """The first process of a process namespace takes all others with it when it dies."""
    child = os.fork()
    if child:
        # Only waits: its death (the parent's kill) reaches the child by the death signal.
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def forbid_writing(folder: str) -> bool:
    """Landlock: nothing on the file system can be changed but below `folder` (and /dev/null)."""

    class Ruleset(ctypes.Structure):
        _fields_ = (("handled_access_fs", ctypes.c_uint64),)

    class PathBeneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))

    version = libc.syscall(LANDLOCK_CREATE_RULESET, 0, 0, 1)
    if version < 1:
        return False
    writes = LANDLOCK_WRITES & (
        (1 << (13 + min(version - 1, 2))) - 1
    )  # later rights came with later versions
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, ctypes.byref(Ruleset(writes)), ctypes.sizeof(Ruleset), 0)
    if ruleset < 0:
        return False
    for path, access in ((folder, writes), ("/dev/null", 1 << 1)):
        fd = os.open(path, os.O_PATH)
        rule = PathBeneath(access, fd)
        libc.syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, ctypes.byref(rule), 0)
        os.close(fd)
    restricted = libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return bool(restricted)


def drop_privileges(folder: str, fences: list[str]) -> None:
    """As root: become a user that owns nothing but the folder, one that no other sandbox is likely to share.

    Where Python itself lies in a folder that only root can read, stay root in name, without its capabilities.
    """
    uid = FIRST_SANDBOX_UID + int.from_bytes(os.urandom(4), "little") % NUM_SANDBOX_UIDS
    try:
        os.chown(folder, uid, uid)
        os.setgroups([])
        os.setegid(uid)
        os.seteuid(uid)
        is_readable = os.access(os.__file__, os.R_OK, effective_ids=True)
        os.seteuid(0)
        os.setegid(0)
        if is_readable:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            fences.append("user")
            return
        os.chown(folder, 0, 0)
    except OSError:
        pass
    drop_capabilities()


def drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    libc.capset(header, (ctypes.c_uint32 * 6)())


def forbid_processes() -> bool:
    """A system-call filter that refuses new processes; threads stay possible."""
    numbers = {"x86_64": (0xC000003E, 56, (57, 58)), "aarch64": (0xC00000B7, 220, ())}.get(os.uname().machine)
    if numbers is None:
        return False
    architecture, clone, forks = numbers
    deny, no_such_call = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    # (code, jump if true, jump if false, value); jumps count the instructions to leap over.
    program = [(0x20, 0, 0, 4), (0x15, 1, 0, architecture), (0x06, 0, 0, 0x7FFF0000), (0x20, 0, 0, 0)]
    for number in forks:
        program += [(0x15, 0, 1, number), (0x06, 0, 0, deny)]
    program += [(0x15, 0, 1, CLONE3), (0x06, 0, 0, no_such_call)]  # the C library then falls back to clone
    program += [(0x15, 0, 3, clone), (0x20, 0, 0, 16), (0x45, 1, 0, CLONE_THREAD), (0x06, 0, 0, deny)]
    program += [(0x06, 0, 0, 0x7FFF0000)]
    packed = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    filter_program = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(buffer))
    return bool(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_program, 0, 0) == 0)


def set_limits(limits: dict[str, int], *, own_user: bool) -> None:
    wanted = {
        resource.RLIMIT_CPU: int(limits["cpu_s"]),
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["num_files"],
        resource.RLIMIT_CORE: 0,
    }
    if own_user:  # the count is per user: under a shared user it would count the whole machine's processes
        wanted[resource.RLIMIT_NPROC] = limits["num_processes"]
    for kind, value in wanted.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def run_program(job: dict[str, object], report: int) -> None:
    """The program, then its checks. Confirmations go straight to the pipe: the program may have closed sys.stdout."""
    secret, checks = str(job["secret"]), job["checks"]
    assert isinstance(checks, list)
    namespace: dict[str, object] = {"__name__": "__main__", "__builtins__": __builtins__}
    write = os.write
    # The program should not find the secret lying about in the frames above it.
    code = str(job["code"])
    job.clear()
    try:
        exec(compile(code, "<program>", "exec"), namespace)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            write(report, f"error exit code {leaving.code}\n".encode())
            checks = []
    except BaseException as error:  # noqa: BLE001  boundary: the program may raise anything
        write(report, f"error {type(error).__name__}: {error}".replace("\n", " ").encode() + b"\n")
        checks = []  # a program that failed has passed nothing
    for index, check in enumerate(checks):
        try:
            exec(compile(check, f"<check {index}>", "exec"), namespace)
        except BaseException as error:  # noqa: BLE001  boundary: so may a check
            text = f"error check {index}: {type(error).__name__}: {error}".replace("\n", " ")
            write(report, text.encode() + b"\n")
        else:
            write(report, f"{secret} {index}\n".encode())
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

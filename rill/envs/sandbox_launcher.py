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

TYPE_CHECKING = False  # typing's own would cost every program some milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
CLONE_THREAD, CLONE3 = 0x00010000, 435
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
CAPABILITY_VERSION_3 = 0x20080522
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_RULE_PATH_BENEATH = 1
# Everything that changes the file system: write, remove, make, refer, truncate. Running programs stays free.
LANDLOCK_WRITES = 0b111_1111_1111_0010
LANDLOCK_WRITE_FILE, LANDLOCK_READ_FILE, LANDLOCK_READ_DIR = 1 << 1, 1 << 2, 1 << 3
READABLE_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/sys/devices/system/cpu")
READABLE_FILES = (
    "/dev/urandom",
    "/dev/zero",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/proc/cpuinfo",
    "/proc/meminfo",
)
# Machine: its name for the filter, `clone`, the calls that only make processes, calls refused always, calls refused
# where other processes can be seen. Always: socket, ptrace, process_vm_readv/writev, io_uring_setup, bpf, userfaultfd,
# perf_event_open, add_key, keyctl, mount, unshare, setns. Seen: kill, tkill, tgkill, rt_(tg)sigqueueinfo, pidfd_*.
CALLS = {
    "x86_64": (
        (0xC000003E, 56, (57, 58)),
        (41, 101, 310, 311, 425, 321, 323, 298, 248, 250, 165, 272, 308),
        (62, 200, 234, 129, 297, 424, 434),
    ),
    "aarch64": (
        (0xC00000B7, 220, ()),
        (198, 117, 270, 271, 425, 280, 282, 241, 217, 219, 40, 97, 268),
        (129, 130, 131, 138, 240, 424, 434),
    ),
}
X32_CALLS = 0x40000000
FIRST_SANDBOX_UID, NUM_SANDBOX_UIDS = 200_000, 50_000

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    report, questions = int(sys.argv[1]), int(sys.argv[2])
    del sys.argv[1:]
    fences = separate()
    if "processes" in fences:
        run_as_first_process()
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if fence_files(job["folder"]):
        fences += ["files", "reads"]
    if os.geteuid() == 0:
        drop_privileges(job["folder"], fences)
    set_limits(job["limits"], own_user="user" in fences)
    if filter_calls(forks=job["limits"]["num_processes"] > 1, signals="processes" in fences):
        fences += ["calls"] if "network" in fences else ["calls", "network"]
    os.environ["RILL_FENCES"] = " ".join(fences)
    sys.stdin = io.TextIOWrapper(io.BytesIO(job["stdin"].encode()), encoding="utf-8")
    run_program(job.pop("code"), report, questions)


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


def fence_files(folder: str) -> bool:
    """Landlock: nothing can be changed but below `folder`, nothing read but there and where Python's own files lie."""

    class Ruleset(ctypes.Structure):
        _fields_ = (("handled_access_fs", ctypes.c_uint64),)

    class PathBeneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))

    version = libc.syscall(LANDLOCK_CREATE_RULESET, 0, 0, 1)
    if version < 1:
        return False
    # Later rights came with later versions.
    writes = LANDLOCK_WRITES & ((1 << (13 + min(version - 1, 2))) - 1)
    reads = LANDLOCK_READ_FILE | LANDLOCK_READ_DIR
    ruleset = libc.syscall(
        LANDLOCK_CREATE_RULESET, ctypes.byref(Ruleset(writes | reads)), ctypes.sizeof(Ruleset), 0
    )
    if ruleset < 0:
        return False
    python = {sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))}
    allowed = {folder: writes | reads, "/dev/null": LANDLOCK_WRITE_FILE | LANDLOCK_READ_FILE}
    allowed |= dict.fromkeys(READABLE_FILES, LANDLOCK_READ_FILE)
    allowed |= dict.fromkeys((*python, *READABLE_FOLDERS), reads)
    for path, access in allowed.items():
        try:
            fd = os.open(path, os.O_PATH)
        except OSError:
            continue  # not on this machine
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


def filter_calls(*, forks: bool, signals: bool) -> bool:
    """A system-call filter: no sockets, no hold on other processes, and no new ones unless `forks`; threads are free.

    Calls of another architecture (32-bit ones, say) are refused: their numbers would slip through.
    """
    if os.uname().machine not in CALLS:
        return False
    (architecture, clone, only_forks), refused, to_others = CALLS[os.uname().machine]
    deny, no_such_call, allow = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x7FFF0000
    # (code, jump if true, jump if false, value); jumps count the instructions to leap over.
    program = [(0x20, 0, 0, 4), (0x15, 1, 0, architecture), (0x06, 0, 0, deny), (0x20, 0, 0, 0)]
    program += [(0x35, 0, 1, X32_CALLS), (0x06, 0, 0, deny)]
    for number in (*refused, *(() if signals else to_others), *(() if forks else only_forks)):
        program += [(0x15, 0, 1, number), (0x06, 0, 0, deny)]
    if not forks:
        program += [
            (0x15, 0, 1, CLONE3),
            (0x06, 0, 0, no_such_call),
        ]  # the C library then falls back to clone
        program += [(0x15, 0, 3, clone), (0x20, 0, 0, 16), (0x45, 1, 0, CLONE_THREAD), (0x06, 0, 0, deny)]
    program += [(0x06, 0, 0, allow)]
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


def run_program(code: str, report: int, questions: int) -> None:
    """The program; then, handed over only now, its checks. Reports go straight to the pipe: the program may have
    closed sys.stdout. What is needed afterwards is held in local names, which it cannot replace from within."""
    namespace: dict[str, object] = {"__name__": "__main__", "__builtins__": __builtins__}
    write, read, leave, load, run, translate, text = (
        os.write,
        os.read,
        os._exit,
        json.loads,
        exec,
        compile,
        str,
    )
    anything, leaving_early, kind, same = BaseException, SystemExit, type, make_same()
    failure = ""
    try:
        run(translate(code, "<program>", "exec"), namespace)
    except leaving_early as leaving:
        if leaving.code not in (None, 0):
            failure = f"exit code {leaving.code}"
    except anything as error:
        failure = f"{kind(error).__name__}: {text(error)}"
    if failure:  # a program that failed has passed nothing
        write(report, f"error {failure}".replace("\n", " ").encode() + b"\n")
        sys.stdout.flush()
        leave(0)
    write(report, b"ready\n")
    asked = b""
    while chunk := read(questions, 65_536):
        asked += chunk
    job = load(asked)
    namespace[job["same"]] = same
    for index, check in enumerate(job["checks"]):
        try:
            run(translate(check, f"<check {index}>", "exec"), namespace)
        except anything as error:
            line = f"error check {index}: {kind(error).__name__}: {text(error)}".replace("\n", " ")
            write(report, line.encode() + b"\n")
        else:
            write(report, f"{job['secret']} {index}\n".encode())
    sys.stdout.flush()
    leave(0)


def make_same() -> Callable[[object, object], bool]:
    """`==` for checks: where plain data is expected, the answer must be plain data, or of a class whose `==` is not
    the program's own. Everything it needs is bound here, before the program can replace it."""
    kind, every, lists, dicts = type, all, (list, tuple, set, frozenset), dict
    plain = frozenset({int, float, complex, bool, str, bytes, bytearray, kind(None), range, dict, *lists})
    function, libraries, chain, refuse = kind(make_same), os.path.dirname(os.__file__), list, AssertionError

    def parts(value: object) -> list[object]:
        if kind(value) is dicts:
            return [*value.keys(), *value.values()]  # type: ignore[attr-defined]
        return chain(value) if kind(value) in lists else []  # type: ignore[call-overload]

    def is_plain(value: object) -> bool:
        return kind(value) in plain and every(is_plain(part) for part in parts(value))

    def is_honest(value: object) -> bool:
        if kind(value) in plain:
            return every(is_honest(part) for part in parts(value))
        compare: Any = kind(value).__eq__
        return kind(compare) is not function or compare.__code__.co_filename.startswith(libraries)

    def same(left: object, right: object) -> bool:
        if (is_plain(right) and not is_honest(left)) or (is_plain(left) and not is_honest(right)):
            raise refuse("plain data is compared with an object whose == is the program's own")
        return left == right

    return same


if __name__ == "__main__":
    main()

"""Locks that hold across processes and machines, on PostgreSQL.

    import syncguard

    with syncguard.Client("postgresql://app@db/app").lock("payment:42") as guard:
        ...  # no other process, on any machine, holds "payment:42" now

This file is the whole binding: it needs the C library (scripts/install-c), and nothing else. SYNCGUARD_LIBRARY names
the library where the loader does not find it.

Times are seconds, or datetime.timedelta. None is the default. math.inf as a timeout waits without end.

Ctrl-C, and every other signal whose handler raises, ends a wait of the main thread: the call is cancelled, what it may
have been granted is released, and then the exception is raised. Calls that do not wait for a lock are not cancelled: they
take at most ``operation_timeout``.

Clients, guards and tokens may be used on several threads. A process that forks makes its clients after the fork.
"""

from __future__ import annotations

import _thread
import ctypes
import logging
import math
import os
import queue
import threading
import time
import weakref
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from datetime import timedelta
from typing import Any, Callable, Generic, Iterable, NamedTuple, Optional, TypeVar, Union

__all__ = [
    "Aborted", "AcquisitionTimeout", "AuthFailed", "Client", "Error", "Guard", "Holder", "Internal", "InvalidArgument", "Leader",
    "Lost", "NetworkTimeout", "RateLimited", "Run", "RunOnce", "Semaphore", "ServiceUnavailable", "Term", "Token",
    "library_version",
]
__version__ = "0.1.0"

T = TypeVar("T")
Seconds = Union[int, float, timedelta]

_log = logging.getLogger("syncguard")
_FOREVER = 2**64 - 1
_OK, _LOCKED, _NOT_HELD, _ALREADY_DONE, _RUNNING, _FAILED = range(6)
_EVERY, _NUMBER, _CLAIM_AT_START = 1, 2, 16
_SLICE_MS = 50


# ---- Errors -----------------------------------------------------------------------------------------------


class Error(Exception):
    """A call failed. The text says what to do; it contains no keys and no passwords."""

    code = "Internal"

    def __init__(self, text: str, sqlstate: Optional[str] = None, may_be_held: Optional[float] = None) -> None:
        super().__init__(text)
        #: The SQLSTATE that the server answered with, if it answered.
        self.sqlstate = sqlstate
        #: None if nothing was changed. Else the outcome is unknown, and the key may stay held for so many seconds
        #: (math.inf: until the lease's own end); the library keeps trying to release it meanwhile.
        self.may_be_held = may_be_held


class ServiceUnavailable(Error):
    """The server is away, or rolled a conflict back. Try again later."""

    code = "ServiceUnavailable"


class AuthFailed(Error):
    """Wrong credentials, or a missing right."""

    code = "AuthFailed"


class InvalidArgument(Error, ValueError):
    """The same call will fail again."""

    code = "InvalidArgument"


class RateLimited(Error):
    """No connection was free."""

    code = "RateLimited"


class NetworkTimeout(Error):
    """An operation's own time ran out."""

    code = "NetworkTimeout"


class AcquisitionTimeout(Error, TimeoutError):
    """Waiting for the key took longer than the timeout."""

    code = "AcquisitionTimeout"


class Aborted(Error):
    """The token was cancelled, or the client was closed; or a job ran and its lease was lost."""

    code = "Aborted"


class Internal(Error):
    """Anything else: a bug, or a limit that must not be passed."""


class Lost(Error):
    """The lock of a ``with`` block was lost while the block ran: another process may have held it, too."""

    code = "Lost"


_ERRORS = {
    -1: ServiceUnavailable, -2: AuthFailed, -3: InvalidArgument, -4: RateLimited, -5: NetworkTimeout,
    -6: AcquisitionTimeout, -7: Aborted,
}


# ---- The library ------------------------------------------------------------------------------------------


class _Options(ctypes.Structure):
    _fields_ = [
        ("ttl_ms", c_uint64), ("timeout_ms", c_uint64), ("min_hold_ms", c_uint64), ("max_hold_ms", c_uint64),
        ("token", c_void_p), ("note", c_char_p), ("fair", c_uint32), ("priority", c_int32),
        ("reserved", c_uint64 * 1),
    ]


class _ClientOptions(ctypes.Structure):
    _fields_ = [
        ("schema", c_char_p), ("table_name", c_char_p), ("fence_table_name", c_char_p),
        ("connection_timeout_ms", c_uint64), ("operation_timeout_ms", c_uint64), ("max_connections", c_uint32),
        ("existing_tables_only", c_uint32), ("members_table_name", c_char_p), ("owner", c_char_p),
        ("reserved", c_uint64 * 2),
    ]


_OnLost = CFUNCTYPE(None, c_char_p, c_void_p)
_Callback = CFUNCTYPE(c_int32, c_void_p, c_void_p)

_OUT = POINTER(c_void_p)
_OPTIONS = POINTER(_Options)
_CHECK = {
    "client_connect_with": [c_char_p, POINTER(_ClientOptions), _OUT],
    "client_close": [c_void_p, c_uint64],
    "token_new": [_OUT],
    "token_child": [c_void_p, _OUT],
    "token_cancel": [c_void_p],
    "token_is_cancelled": [c_void_p],
    "lock_with": [c_void_p, c_char_p, _OPTIONS, _OUT],
    "try_lock_with": [c_void_p, c_char_p, _OPTIONS, _OUT],
    "read_lock": [c_void_p, c_char_p, _OPTIONS, _OUT],
    "try_read_lock": [c_void_p, c_char_p, _OPTIONS, _OUT],
    "lock_all": [c_void_p, POINTER(c_char_p), c_size_t, _OPTIONS, _OUT],
    "try_lock_all": [c_void_p, POINTER(c_char_p), c_size_t, _OPTIONS, _OUT],
    "acquire_permit": [c_void_p, c_char_p, c_uint32, _OPTIONS, _OUT],
    "try_acquire_permit": [c_void_p, c_char_p, c_uint32, _OPTIONS, _OUT],
    "permits_in_use": [c_void_p, c_char_p, POINTER(c_uint32)],
    "guard_is_held": [c_void_p],
    "guard_is_shared": [c_void_p],
    "guard_wait_lost": [c_void_p, c_uint64],
    "guard_on_lost": [c_void_p, _OnLost, c_void_p],
    "guard_extend": [c_void_p, c_uint64],
    "guard_fence_sql": [c_void_p, _OUT],
    "guard_release": [c_void_p],
    "guard_release_now": [c_void_p],
    "elect": [c_void_p, c_char_p, _OPTIONS, _Callback, c_void_p],
    "leader": [c_void_p, c_char_p, POINTER(c_uint64), POINTER(c_int64), POINTER(c_int64)],
    "holder": [c_void_p, c_char_p, POINTER(c_uint64), POINTER(c_int64), _OUT, _OUT],
    "term_is_held": [c_void_p],
    "term_wait_lost": [c_void_p, c_uint64],
    "term_fence_sql": [c_void_p, _OUT],
    "run_once": [c_void_p, c_char_p, c_int32, c_uint64, _OPTIONS, _Callback, c_void_p],
    "run_is_held": [c_void_p],
    "run_wait_lost": [c_void_p, c_uint64],
    "run_completion_sql": [c_void_p, _OUT],
}
_NUMBERS = {
    "guard_fence": [c_void_p], "guard_fence_of": [c_void_p, c_char_p], "guard_remaining_ms": [c_void_p],
    "term_number": [c_void_p], "term_remaining_ms": [c_void_p], "run_slot": [c_void_p], "run_skipped": [c_void_p],
    "run_fence": [c_void_p], "run_remaining_ms": [c_void_p], "run_period_start_ms": [c_void_p],
    "last_error_may_be_held_ms": [],
}
_FREES = ["client_free", "guard_free", "token_free", "text_free"]
_TEXTS = ["last_error", "last_error_sqlstate", "version"]


def _load() -> Any:
    named = os.environ.get("SYNCGUARD_LIBRARY")
    try:
        lib = ctypes.CDLL(named or "libsyncguard.so.0.1")
    except OSError as error:
        raise ImportError(
            f"the C library of syncguard cannot be loaded ({error}): install it with scripts/install-c, or name it in "
            "SYNCGUARD_LIBRARY"
        ) from None
    typed = [(name, c_int32, of) for name, of in _CHECK.items()] + [(name, c_uint64, of) for name, of in _NUMBERS.items()]
    typed += [(name, None, [c_void_p]) for name in _FREES] + [(name, c_char_p, []) for name in _TEXTS]
    typed.append(("guard_permit", c_uint32, [c_void_p]))
    for name, result, arguments in typed:
        function = getattr(lib, "syncguard_" + name)
        function.restype, function.argtypes = result, arguments
        setattr(lib, name, function)
    version = lib.version().decode()
    if version.split(".")[:2] != __version__.split(".")[:2]:
        raise ImportError(f"the C library is {version}, and this file is for {__version__}: install both together")
    return lib


_lib = _load()


def library_version() -> str:
    """The version of the C library."""
    return _lib.version().decode()


def _checked(code: int) -> int:
    if code >= 0:
        return code
    held = _lib.last_error_may_be_held_ms()
    may_be_held = None if held == 0 else math.inf if held == _FOREVER else held / 1000
    text = _lib.last_error().decode("utf-8", "replace")
    raise _ERRORS.get(code, Internal)(text, _lib.last_error_sqlstate().decode() or None, may_be_held)


def _text(value: str, name: str) -> bytes:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} is no str")
    if "\0" in value:  # C would take what stands before it.
        raise InvalidArgument(f"{name} contains U+0000, which PostgreSQL text cannot hold: leave it out")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name} is not valid Unicode") from None


def _ms(value: Optional[Seconds], name: str, forever: bool = False) -> int:
    """0, which is the default in C, only for None."""
    if value is None:
        return 0
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise InvalidArgument(f"{name} is not above 0 s")
    if math.isinf(seconds):
        if forever:
            return _FOREVER
        raise InvalidArgument(f"{name} is endless")
    return min(max(round(seconds * 1000), 1), _FOREVER - 1)


def _give(code: int, out: c_void_p) -> str:
    """The text that a function has given, freed."""
    _checked(code)
    if not out.value:
        raise Aborted("the lock was released: there is nothing to fence with")
    try:
        return ctypes.string_at(out.value).decode()
    finally:
        _lib.text_free(out)


# ---- Waits that signals end ---------------------------------------------------------------------------------


class _Waiting(Generic[T]):
    """A call of C that may wait, on a thread of its own, so that the main thread can handle signals meanwhile.

    What the call calls back runs on the main thread. What it returns is owned by an object from the beginning, so that
    an exception at any place leaves nothing behind.
    """

    def __init__(self, call: Callable[["_Waiting[T]"], T], cancel: Optional[Callable[[], None]]) -> None:
        self._call, self._cancel = call, cancel
        # Only what is one call of C is safe from a signal's exception half way: a Condition would stay locked.
        self._mutex = threading.Lock()
        self._events: "queue.SimpleQueue[Optional[Callable[[], None]]]" = queue.SimpleQueue()
        self._answered: Any = None  # Locked until the question is answered.
        self._begun = self._refused = self._done = False
        self._result: Optional[T] = None
        self._error: Optional[BaseException] = None

    def ask(self, question: Callable[[], None]) -> bool:
        """Has this run on the main thread. False if that does not listen any more."""
        answered = threading.Lock()
        answered.acquire()
        with self._mutex:
            if self._refused:
                return False
            self._answered = answered
        self._events.put(question)
        answered.acquire()
        return not self._refused

    def _run(self) -> None:
        with self._mutex:
            if self._refused:
                return
            self._begun = True
        try:
            self._result = self._call(self)
        except BaseException as error:
            self._error = error
        self._done = True
        self._events.put(None)

    def wait(self) -> T:
        try:
            # One call of C, which a signal comes before or after; Thread.start() can be interrupted half way.
            _thread.start_new_thread(self._run, ())
            self._serve()
        except BaseException:
            self._give_up()
            raise
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result  # type: ignore[return-value]

    def _serve(self) -> None:
        while True:
            question = self._events.get()
            if question is None:
                return
            try:
                question()
            finally:
                self._answer()

    def _answer(self) -> None:
        """Lets whoever asked go on; twice does no harm."""
        answered = self._answered
        if answered is not None and answered.locked():
            answered.release()

    def _give_up(self) -> None:
        """Ends the call, whatever else arrives meanwhile, and lets go of what it was granted."""
        while True:
            try:
                with self._mutex:
                    self._refused = True
                self._answer()
                if self._cancel is None:
                    return  # It ends by itself, and its result with it.
                self._cancel()
                while self._begun and not self._done:
                    self._events.get()
                if isinstance(self._result, Guard):
                    self._result._end()
                return
            except BaseException:
                continue


def _interruptible(call: Callable[[Optional[_Waiting[T]]], T], cancel: Optional[Callable[[], None]]) -> T:
    """Only the main thread handles signals: others call directly."""
    if threading.current_thread() is not threading.main_thread():
        return call(None)
    return _Waiting(call, cancel).wait()


def _ended(token: "Token", call: Callable[[Optional[_Waiting[T]]], T]) -> T:
    """With a token of the call's own, which is freed here: an exception in a finalizer would be lost."""
    try:
        return _interruptible(call, token.cancel)
    finally:
        token._free()


class _Uses:
    """Counts the calls that use a pointer which ends with a callback."""

    def __init__(self, pointer: int) -> None:
        self._pointer: Optional[int] = pointer
        self._users: set = set()
        self._mutex = threading.Lock()

    def use(self, call: Callable[[int], T], otherwise: T) -> T:
        me = object()
        try:
            with self._mutex:
                if self._pointer is None:
                    return otherwise
                pointer = self._pointer
                self._users.add(me)
            return call(pointer)
        finally:
            self._users.discard(me)  # One call of C: no signal comes in between.

    def end(self) -> None:
        with self._mutex:
            self._pointer = None
        while self._users:
            time.sleep(0.001)


def _wait_lost(wait: Callable[[int], int], timeout: Optional[Seconds]) -> bool:
    """In slices, between which signals are handled and the end of a term is seen."""
    rest = _FOREVER if timeout is None else 0 if timeout == 0 else _ms(timeout, "timeout", forever=True)
    end = math.inf if rest == _FOREVER else time.monotonic() + rest / 1000
    while True:
        left = end - time.monotonic()
        ms = _SLICE_MS if left > _SLICE_MS / 1000 else max(math.ceil(left * 1000), 0)
        if _checked(wait(ms)) == _NOT_HELD:
            return True
        if left * 1000 <= _SLICE_MS:
            return False


# ---- Tokens and guards ------------------------------------------------------------------------------------


class Token:
    """Ends waits: hand it to calls as ``token=``, and cancel it on any thread."""

    def __init__(self, parent: Optional["Token"] = None) -> None:
        out = c_void_p()
        _checked(_lib.token_new(byref(out)) if parent is None else _lib.token_child(parent._pointer, byref(out)))
        self._pointer = out
        self._free = weakref.finalize(self, _lib.token_free, out)

    def cancel(self) -> None:
        """Ends every wait that has this token, now and later, with Aborted. Nothing that is held is released."""
        _checked(_lib.token_cancel(self._pointer))

    @property
    def cancelled(self) -> bool:
        return bool(_lib.token_is_cancelled(self._pointer))


class Guard:
    """A held lock, shared or not, several of them, or a permit: renewed until it is released.

    A ``with`` block releases it at its end, and raises Lost there if the lease had been lost by then. A guard that
    nobody refers to any more is released, too.
    """

    def __init__(self, pointer: c_void_p) -> None:
        self._pointer = pointer
        self._callback: Any = None
        self._over = False
        # Also when the interpreter exits, while it still works.
        self._free = weakref.finalize(self, _lib.guard_free, pointer)

    @property
    def fence(self) -> int:
        """The fencing token: greater than that of every earlier grant of the key. 0 for a guard of several keys."""
        return _lib.guard_fence(self._pointer)

    def fence_of(self, key: str) -> int:
        """The fence of one of its keys; 0 if it is none of them."""
        return _lib.guard_fence_of(self._pointer, _text(key, "key"))

    @property
    def permit(self) -> Optional[int]:
        """Which of its semaphore's permits this is, from 1; None if it is a lock."""
        return _lib.guard_permit(self._pointer) or None

    @property
    def shared(self) -> bool:
        """Whether it is a reader's."""
        return bool(_lib.guard_is_shared(self._pointer))

    @property
    def held(self) -> bool:
        """Whether the lease can be trusted, by this process's clock. No network."""
        return bool(_lib.guard_is_held(self._pointer))

    @property
    def lost(self) -> bool:
        """Whether to stop working: the lease was lost, or the guard released."""
        return not self.held

    @property
    def remaining(self) -> float:
        """For how many seconds the lease can be trusted without a further renewal."""
        return _lib.guard_remaining_ms(self._pointer) / 1000

    def wait_lost(self, timeout: Optional[Seconds] = None) -> bool:
        """Waits until the lease is lost or the guard released. False if the time is over before."""
        return _wait_lost(lambda ms: _lib.guard_wait_lost(self._pointer, ms), timeout)

    def on_lost(self, callback: Optional[Callable[[str], None]]) -> bool:
        """Calls back once with the reason if the lease is lost, on a thread of the library: be short.

        Replaces the callback before. False if the lease was lost already (then it has been called now) or released
        (then it is not). After ``release`` it does not run and is not called any more.
        """

        def call(reason: bytes, _user: Any) -> None:
            if callback is not None:
                callback(reason.decode())

        made = _OnLost(call) if callback is not None else _OnLost()
        before, self._callback = self._callback, made
        answer = _checked(_lib.guard_on_lost(self._pointer, made, None))
        del before  # C has let go of it.
        return answer == _OK

    def extend(self, ttl: Seconds) -> bool:
        """The lease ends ``ttl`` from now, and later renewals take the same. False: it was lost."""
        return _checked(_lib.guard_extend(self._pointer, _ms(ttl, "ttl"))) == _OK

    def fence_sql(self) -> str:
        """The statement that fails (SQLSTATE 22P02) unless the lease is live and its fence the newest.

        Run it first in the transaction that writes what the lock protects, on the database that the locks are in:
        ``cursor.execute(guard.fence_sql())``, without parameters. While the transaction is open nobody else is granted
        the key. It contains the key and the lock id: do not log it.
        """
        out = c_void_p()
        return _give(_lib.guard_fence_sql(self._pointer, byref(out)), out)

    def release(self) -> bool:
        """Releases the lock. False if it was lost, or released before.

        After an error the library keeps trying until the lease is over.
        """
        self._over = True
        return _checked(_lib.guard_release(self._pointer)) == _OK

    def release_now(self) -> bool:
        """The same, and ends ``min_hold`` early: the key is free at once."""
        self._over = True
        return _checked(_lib.guard_release_now(self._pointer)) == _OK

    def _end(self) -> bool:
        """Releases it for a caller who is busy with something else. False if it was lost."""
        try:
            return self.release()
        except Error as error:
            _log.warning("a lock could not be released, and the library keeps trying: %s", error)
            return True

    def __enter__(self) -> "Guard":
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if self._over:
            return
        if not self._end() and kind is None:
            raise Lost("the lock was lost while the block ran: another process may have held it, too")


class Semaphore:
    """At most ``limit`` permits of this name are held at a time, on all machines together."""

    def __init__(self, client: "Client", name: str, limit: int) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= 1024:
            raise InvalidArgument("a semaphore has 1 to 1024 permits")
        self._client, self._name, self.limit = client, _text(name, "name"), limit

    def acquire(self, **options: Any) -> Guard:
        """Waits for a permit. The options are those of Client.lock."""
        guard = self._client._take(_lib.acquire_permit, (self._name, self.limit), options)
        assert guard is not None
        return guard

    def try_acquire(self, **options: Any) -> Optional[Guard]:
        """Tries once; None if all permits are held."""
        return self._client._take(_lib.try_acquire_permit, (self._name, self.limit), options)

    def in_use(self) -> int:
        """How many permits of this name are held now, whatever their limit. For display."""
        out = c_uint32()
        _checked(_lib.permits_in_use(self._client._pointer, self._name, byref(out)))
        return out.value


class Term:
    """A term of a leader, until its function returns; after that it is not held. For every thread."""

    def __init__(self, pointer: int) -> None:
        self._uses = _Uses(pointer)
        #: The number of the term, which is its fence.
        self.number: int = _lib.term_number(pointer)

    @property
    def held(self) -> bool:
        return bool(self._uses.use(_lib.term_is_held, 0))

    @property
    def lost(self) -> bool:
        return not self.held

    @property
    def remaining(self) -> float:
        return self._uses.use(_lib.term_remaining_ms, 0) / 1000

    def wait_lost(self, timeout: Optional[Seconds] = None) -> bool:
        """Waits until the term is over. False if the time is over before."""
        return _wait_lost(lambda ms: self._uses.use(lambda at: _lib.term_wait_lost(at, ms), _NOT_HELD), timeout)

    def fence_sql(self) -> str:
        """As Guard.fence_sql."""
        return _sql_of(self._uses, _lib.term_fence_sql)


class Run:
    """A run of a job, until its function returns; after that it is not held. For every thread."""

    def __init__(self, pointer: int) -> None:
        self._uses = _Uses(pointer)
        #: The number of the slot: the server's clock divided by the period, or your number.
        self.slot: int = _lib.run_slot(pointer)
        #: When the period began, in Unix milliseconds of the server's clock; None for a number of yours.
        self.period_start_ms: Optional[int] = _lib.run_period_start_ms(pointer) or None
        #: How many slots were missed since the last one that was marked.
        self.skipped: int = _lib.run_skipped(pointer)
        #: The fence of the run's lease.
        self.fence: int = _lib.run_fence(pointer)

    @property
    def held(self) -> bool:
        return bool(self._uses.use(_lib.run_is_held, 0))

    @property
    def lost(self) -> bool:
        return not self.held

    @property
    def remaining(self) -> float:
        return self._uses.use(_lib.run_remaining_ms, 0) / 1000

    def wait_lost(self, timeout: Optional[Seconds] = None) -> bool:
        return _wait_lost(lambda ms: self._uses.use(lambda at: _lib.run_wait_lost(at, ms), _NOT_HELD), timeout)

    def completion_sql(self) -> str:
        """Exactly once, for what the job writes to the database that the locks are in.

        Two statements that mark the slot, and fail unless the run's lease is live and its fence the newest. Run them
        first in the job's transaction, without parameters, and commit it before the job returns: then the slot is
        marked by it and by nothing else. Not with claim_at_start.
        """
        return _sql_of(self._uses, _lib.run_completion_sql)


def _sql_of(uses: _Uses, function: Any) -> str:
    def ask(pointer: int) -> str:
        out = c_void_p()
        return _give(function(pointer, byref(out)), out)

    text = uses.use(ask, "")
    if not text:
        raise Aborted("the function has returned, and its lease was released")
    return text


class Leader(NamedTuple):
    """Who leads, by the server's clock."""

    term: int
    since_ms: int
    expires_at_ms: int


class Holder(NamedTuple):
    """Who holds a key, by the server's clock. ``owner`` and ``note`` are the holder's words; None if it gave none."""

    fence: int
    expires_at_ms: int
    owner: Optional[str]
    note: Optional[str]


class RunOnce(NamedTuple):
    """What became of a job: ``outcome`` is "done", "already_done" or "running" (elsewhere); ``value`` what it returned."""

    outcome: str
    value: Any = None

    @property
    def ran(self) -> bool:
        """Whether it ran here."""
        return self.outcome == "done"


# ---- The client -------------------------------------------------------------------------------------------


class Client:
    """One per program, for all its threads. Creates the two tables if they are missing.

    ``owner``: who this program is, shown to others that ask who has a key; at most 1 KiB.
    """

    def __init__(
        self,
        url: str,
        *,
        schema: Optional[str] = None,
        table_name: Optional[str] = None,
        fence_table_name: Optional[str] = None,
        members_table_name: Optional[str] = None,
        connection_timeout: Optional[Seconds] = None,
        operation_timeout: Optional[Seconds] = None,
        max_connections: Optional[int] = None,
        existing_tables_only: bool = False,
        owner: Optional[str] = None,
    ) -> None:
        if max_connections is not None and not 1 <= max_connections <= 2**32 - 1:
            raise InvalidArgument("max_connections is below 1: a client needs at least one")
        options = _ClientOptions(
            schema=None if schema is None else _text(schema, "schema"),
            table_name=None if table_name is None else _text(table_name, "table_name"),
            fence_table_name=None if fence_table_name is None else _text(fence_table_name, "fence_table_name"),
            members_table_name=None if members_table_name is None else _text(members_table_name, "members_table_name"),
            connection_timeout_ms=_ms(connection_timeout, "connection_timeout"),
            operation_timeout_ms=_ms(operation_timeout, "operation_timeout"),
            max_connections=max_connections or 0,
            existing_tables_only=int(existing_tables_only),
            owner=None if owner is None else _text(owner, "owner"),
        )
        url_text = _text(url, "url")

        def connect(_waiting: Any) -> _Handle:
            out = c_void_p()
            _checked(_lib.client_connect_with(url_text, byref(options), byref(out)))
            return _Handle(out)

        self._handle = _interruptible(connect, None)
        self._pointer = self._handle.pointer

    # -- locks

    def lock(
        self,
        key: str,
        *,
        ttl: Optional[Seconds] = None,
        timeout: Optional[Seconds] = None,
        min_hold: Optional[Seconds] = None,
        max_hold: Optional[Seconds] = None,
        token: Optional[Token] = None,
        note: Optional[str] = None,
        fair: bool = False,
        priority: int = 0,
    ) -> Guard:
        """Waits for the lock, ``timeout`` (5 s by default; math.inf: without end).

        ``ttl``: how long the key stays taken if this process dies, 30 s by default; it is renewed while the guard
        lives. ``min_hold``: the key stays taken this long from its grant, released or not. ``max_hold``: the lock counts
        as lost this long after its grant. ``token``: ends the wait. ``note``: what it is held for, shown to others that
        ask who has the key; at most 1 KiB. ``fair``: those who ask for it are served in order, the greater
        ``priority`` first.
        """
        options = {"ttl": ttl, "timeout": timeout, "min_hold": min_hold, "max_hold": max_hold, "token": token, "note": note}
        options.update(fair=fair, priority=priority)
        guard = self._take(_lib.lock_with, (_text(key, "key"),), options)
        assert guard is not None
        return guard

    def try_lock(self, key: str, **options: Any) -> Optional[Guard]:
        """Tries once; None if somebody else holds the key. The options are those of ``lock``."""
        return self._take(_lib.try_lock_with, (_text(key, "key"),), options)

    def read_lock(self, key: str, **options: Any) -> Guard:
        """Shares the key with other readers; whoever takes the plain key is a writer, and has it beside none of them.

        The options are those of ``lock``. A reader yields to a writer that has waited for longer. Readers that have the
        key at one time have one fence.
        """
        guard = self._take(_lib.read_lock, (_text(key, "key"),), options)
        assert guard is not None
        return guard

    def try_read_lock(self, key: str, **options: Any) -> Optional[Guard]:
        """Tries once; None if a writer holds the key, or waits for it."""
        return self._take(_lib.try_read_lock, (_text(key, "key"),), options)

    def lock_all(self, keys: Iterable[str], **options: Any) -> Guard:
        """Takes 1 to 64 keys together, all or none, under one guard. No order of the keys can deadlock."""
        guard = self._take(_lib.lock_all, _keys(keys), options)
        assert guard is not None
        return guard

    def try_lock_all(self, keys: Iterable[str], **options: Any) -> Optional[Guard]:
        """Tries once; None if somebody else holds one of the keys."""
        return self._take(_lib.try_lock_all, _keys(keys), options)

    def semaphore(self, name: str, limit: int) -> Semaphore:
        """At most ``limit`` (1 to 1024) permits of this name at a time. No network."""
        return Semaphore(self, name, limit)

    def _take(self, function: Any, arguments: tuple, options: dict) -> Optional[Guard]:
        token, chosen = _options(**options)

        def take(_waiting: Any) -> Optional[Guard]:
            out = c_void_p()
            code = _checked(function(self._pointer, *arguments, byref(chosen), byref(out)))
            return None if code == _LOCKED else Guard(out)

        return _ended(token, take)

    # -- leaders

    def elect(
        self,
        key: str,
        lead: Callable[[Term], T],
        *,
        ttl: Optional[Seconds] = None,
        token: Optional[Token] = None,
        note: Optional[str] = None,
    ) -> T:
        """Campaigns for the key, and calls ``lead`` on this thread for each term that is won.

        If ``lead`` returns a true value, ``elect`` returns that; otherwise it steps down and campaigns again.
        An exception ends the term and propagates. A server that is away is waited for. ``token`` ends the campaign, not a
        term that has begun.
        """
        stop, chosen = _options(ttl=ttl, token=token, note=note)
        name = _text(key, "key")
        outcome: dict = {}

        def campaign(waiting: Optional[_Waiting[None]]) -> None:
            def on_term(pointer: int, _user: Any) -> int:
                return _answer(waiting, Term(pointer), lead, outcome, lambda value: bool(value))

            _checked(_lib.elect(self._pointer, name, byref(chosen), _Callback(on_term), None))

        _ended(stop, campaign)
        if "raised" in outcome:
            raise outcome["raised"]
        return outcome["value"]

    def leader(self, key: str) -> Optional[Leader]:
        """Who leads now, by the server's clock; None if nobody does."""
        term, since, until = c_uint64(), c_int64(), c_int64()
        code = _lib.leader(self._pointer, _text(key, "key"), byref(term), byref(since), byref(until))
        return None if _checked(code) == _NOT_HELD else Leader(term.value, since.value, until.value)

    def holder(self, key: str) -> Optional[Holder]:
        """Who holds the key now, a lock as a leader, in its own words; None if nobody does. For display."""
        fence, until, owner, note = c_uint64(), c_int64(), c_void_p(), c_void_p()
        code = _lib.holder(self._pointer, _text(key, "key"), byref(fence), byref(until), byref(owner), byref(note))
        try:
            if _checked(code) == _NOT_HELD:
                return None
            said = [ctypes.string_at(out.value).decode() if out.value else None for out in (owner, note)]
            return Holder(fence.value, until.value, *said)
        finally:
            _lib.text_free(owner)
            _lib.text_free(note)

    # -- once per slot

    def run_once(
        self,
        name: str,
        job: Callable[[Run], Any],
        *,
        every: Optional[Seconds] = None,
        number: Optional[int] = None,
        claim_at_start: bool = False,
        ttl: Optional[Seconds] = None,
        token: Optional[Token] = None,
        note: Optional[str] = None,
    ) -> RunOnce:
        """Runs the job on this thread, unless its slot is done or another process runs it, and marks the slot.

        The slot is the current period of ``every`` by the server's clock, or a ``number`` of yours that grows. An
        exception of the job propagates, and its slot may run again. With ``claim_at_start`` the slot is marked before: at
        most once. An error whose text begins with "the job ran" means that the slot could not be marked.
        """
        if (every is None) == (number is None):
            raise InvalidArgument("give either every or number")
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**64):
            raise InvalidArgument("number is no whole number from 0")
        kind, value = (_EVERY, _ms(every, "every")) if number is None else (_NUMBER, number)
        stop, chosen = _options(ttl=ttl, token=token, note=note)
        text = _text(name, "name")
        outcome: dict = {}

        def run(waiting: Optional[_Waiting[int]]) -> int:
            def on_run(pointer: int, _user: Any) -> int:
                return _answer(waiting, Run(pointer), job, outcome, lambda _value: False)

            slot = kind | (_CLAIM_AT_START if claim_at_start else 0)
            return _checked(_lib.run_once(self._pointer, text, slot, value, byref(chosen), _Callback(on_run), None))

        code = _ended(stop, run)
        if "raised" in outcome:
            raise outcome["raised"]
        names = {_OK: "done", _ALREADY_DONE: "already_done", _RUNNING: "running"}
        return RunOnce(names[code], outcome.get("value"))

    # -- the end

    def close(self, timeout: Seconds = 5.0) -> bool:
        """No new locks; waits end with Aborted, holders are told, leases are released. True if nothing is left."""
        code = _lib.client_close(self._pointer, _ms(timeout, "timeout"))
        if code == -5:
            return False
        return _checked(code) == _OK

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        self.close()


class _Handle:
    """Owns the pointer of a client."""

    def __init__(self, pointer: c_void_p) -> None:
        self.pointer = pointer
        weakref.finalize(self, _lib.client_free, pointer)


def _keys(keys: Iterable[str]) -> tuple:
    if isinstance(keys, str):
        raise InvalidArgument("keys is a str: give a list of keys")
    texts = [_text(key, "a key") for key in keys]
    return ((c_char_p * len(texts))(*texts), len(texts))


def _int32(number: int, what: str) -> int:
    """ctypes would cut off what does not fit."""
    if isinstance(number, bool) or not isinstance(number, int) or not -(2**31) <= number < 2**31:
        raise InvalidArgument(f"{what} is not an integer of 32 bits")
    return number


def _options(
    ttl: Optional[Seconds] = None,
    timeout: Optional[Seconds] = None,
    min_hold: Optional[Seconds] = None,
    max_hold: Optional[Seconds] = None,
    token: Optional[Token] = None,
    note: Optional[str] = None,
    fair: bool = False,
    priority: int = 0,
) -> tuple:
    """A token of this call's own, which the caller's cancels, too; and the options for C."""
    own = Token(token)
    chosen = _Options(
        ttl_ms=_ms(ttl, "ttl"),
        timeout_ms=_ms(timeout, "timeout", forever=True),
        min_hold_ms=_ms(min_hold, "min_hold"),
        max_hold_ms=_ms(max_hold, "max_hold"),
        token=own._pointer,
        note=None if note is None else _text(note, "note"),
        fair=int(bool(fair)),
        priority=_int32(priority, "priority"),
    )
    return own, chosen


def _answer(
    waiting: Optional[_Waiting[Any]],
    borrowed: Any,
    function: Callable[[Any], Any],
    outcome: dict,
    ends: Callable[[Any], bool],
) -> int:
    """Calls the caller's function for C, on the main thread if that waits. What C is to be answered with: 0 goes on."""
    answer = 1

    def call() -> None:
        nonlocal answer
        try:
            outcome["value"] = function(borrowed)
            answer = int(ends(outcome["value"]))
        except BaseException as error:
            outcome["raised"] = error

    try:
        if waiting is None:
            call()
        elif not waiting.ask(call):
            answer = 1
    finally:
        borrowed._uses.end()
    return answer

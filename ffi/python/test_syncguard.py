"""The binding against a real server: SYNCGUARD_TEST_URL, SYNCGUARD_TEST_SCHEMA. tests/it/python.rs runs it."""

import _thread
import ctypes
import faulthandler
import gc
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import unittest
from datetime import timedelta

import syncguard

URL = os.environ["SYNCGUARD_TEST_URL"]
SCHEMA = os.environ["SYNCGUARD_TEST_SCHEMA"]
LIMIT = 60
# Long enough for a call or two: an attempt that is cut short is no timeout of the wait.
BRIEF = 2


def setUpModule():
    # Whoever starts the tests may have it ignored, as nohup does for background jobs of a shell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ends instead of hanging.
    faulthandler.dump_traceback_later(15 * LIMIT, exit=True)


def tearDownModule():
    faulthandler.cancel_dump_traceback_later()


class Connection:
    """What a test needs of libpq: a connection beside the library's."""

    pq = ctypes.CDLL("libpq.so.5")
    pq.PQconnectdb.restype = pq.PQexec.restype = ctypes.c_void_p
    pq.PQresultErrorField.restype = pq.PQgetvalue.restype = pq.PQcmdStatus.restype = ctypes.c_char_p
    pq.PQresultErrorField.argtypes = [ctypes.c_void_p, ctypes.c_int]
    pq.PQgetvalue.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    pq.PQexec.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    for function in (pq.PQcmdStatus, pq.PQclear, pq.PQfinish, pq.PQntuples):
        function.argtypes = [ctypes.c_void_p]

    def __init__(self):
        self.pointer = self.pq.PQconnectdb(URL.encode())
        self.run(f"SET search_path = {SCHEMA}; SET client_min_messages = warning")

    def run(self, statement):
        """The command's tag, the first value if there is one, or the SQLSTATE of its failure."""
        result = self.pq.PQexec(self.pointer, statement.encode())
        try:
            state = self.pq.PQresultErrorField(result, ord("C"))
            if state:
                return state.decode()
            if self.pq.PQntuples(result):
                return self.pq.PQgetvalue(result, 0, 0).decode()
            return self.pq.PQcmdStatus(result).decode()
        finally:
            self.pq.PQclear(result)


def wait_until(condition):
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("it did not come to be")
        time.sleep(0.005)


class Locks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.client = syncguard.Client(URL, schema=SCHEMA)
        cls.sql = Connection()
        cls.sql.run("CREATE TABLE IF NOT EXISTS effects (n int)")

    @classmethod
    def tearDownClass(cls):
        cls.sql.pq.PQfinish(cls.sql.pointer)
        assert cls.client.close(), "nothing is left"
        del cls.client

    def setUp(self):
        self.key = self.id()

    def rows(self):
        return int(self.sql.run("SELECT count(*) FROM syncguard_locks"))

    def waiters(self, key):
        return int(self.sql.run(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 1936160619 AND objsubid = 2 "
            f"AND objid::int8 = (hashtext('{key}')::int8 & 4294967295)"
        ))

    def interrupt_when_waited_for(self, key, number=signal.SIGINT):
        """Sends this process a signal once the main thread waits for the key."""
        main = threading.main_thread().ident

        def send():
            connection = Connection()
            query = (
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 1936160619 AND objsubid = 2 "
                f"AND objid::int8 = (hashtext('{key}')::int8 & 4294967295)"
            )
            wait_until(lambda: connection.run(query) != "0")
            connection.pq.PQfinish(connection.pointer)
            signal.pthread_kill(main, number)

        thread = threading.Thread(target=send)
        thread.start()
        self.addCleanup(thread.join)
        return thread


class Guards(Locks):
    def test_a_with_block_holds_the_lock_and_releases_it(self):
        with syncguard.Client(URL, schema=SCHEMA).lock(self.key) as guard:
            self.assertTrue(guard.held and not guard.lost and guard.fence == 1 and guard.remaining > 0)
            self.assertIsNone(guard.permit)
            self.assertIsNone(self.client.try_lock(self.key))
            self.assertTrue(guard.extend(timedelta(seconds=20)))
            self.assertFalse(guard.wait_lost(0.001))
        self.assertTrue(guard.lost and guard.wait_lost() and not guard.release())
        with self.client.try_lock(self.key) as guard:
            self.assertEqual(guard.fence, 2)
            self.assertTrue(guard.release())
            self.assertFalse(guard.extend(1))

    def test_a_guard_that_is_dropped_or_raised_through_is_released(self):
        guard = self.client.lock(self.key)
        del guard
        with self.assertRaises(ZeroDivisionError):
            with self.client.try_lock(self.key):
                1 / 0
        cycle = [self.client.try_lock(self.key)]
        cycle.append(cycle)
        del cycle
        gc.collect()
        self.assertEqual(self.rows(), 0)

    def test_a_block_whose_lock_was_lost_says_so_unless_it_says_something_else(self):
        with self.assertRaises(syncguard.Lost):
            with self.client.lock(self.key, ttl=2) as guard:
                self.sql.run("DELETE FROM syncguard_locks")
                self.assertTrue(guard.wait_lost(LIMIT))
        with self.assertRaises(KeyError):
            with self.client.lock(self.key, max_hold=0.02) as guard:
                self.assertTrue(guard.wait_lost(LIMIT))
                raise KeyError

    def test_the_callback_is_told_why_and_not_after_the_release(self):
        told, called = [], threading.Event()

        def on_lost(reason):
            told.append(reason)
            called.set()

        guard = self.client.lock(self.key, max_hold=BRIEF)
        self.assertTrue(guard.on_lost(lambda reason: told.append("replaced")))
        self.assertTrue(guard.on_lost(on_lost))
        self.assertTrue(called.wait(LIMIT))
        self.assertFalse(guard.on_lost(on_lost))
        self.assertEqual(told, ["the guard's max_hold_ms was reached"] * 2)
        guard.release()
        self.assertFalse(guard.on_lost(on_lost))
        with self.client.lock(self.key) as guard:
            guard.on_lost(on_lost)
            guard.on_lost(None)
            guard.on_lost(on_lost)
        self.assertEqual(len(told), 2)

    def test_a_release_on_another_thread_ends_the_wait_for_a_loss(self):
        guard = self.client.lock(self.key)
        thread = threading.Thread(target=guard.release)
        thread.start()
        self.assertTrue(guard.wait_lost())
        thread.join()

    def test_min_hold_keeps_the_key_and_release_now_does_not(self):
        self.client.lock(self.key, min_hold=LIMIT).release()
        self.assertIsNone(self.client.try_lock(self.key))
        self.client.lock(self.key + "2", min_hold=LIMIT).release_now()
        self.client.try_lock(self.key + "2").release()
        self.sql.run("DELETE FROM syncguard_locks")

    def test_several_keys_are_one_guard(self):
        with self.client.lock_all(["b", "a"]) as guard:
            self.assertEqual((guard.fence, guard.fence_of("a"), guard.fence_of("c")), (0, 1, 0))
            self.assertIsNone(self.client.try_lock_all(("a", "c")))
            self.assertEqual(self.rows(), 2)
        self.assertEqual(self.rows(), 0)

    def test_readers_share_a_key_and_a_writer_does_not(self):
        with self.client.read_lock(self.key) as one, self.client.try_read_lock(self.key) as two:
            self.assertTrue(one.shared and two.shared and one.held)
            self.assertEqual(one.fence, two.fence)
            self.assertIsNone(self.client.try_lock(self.key))
        with self.client.lock(self.key) as writer:
            self.assertFalse(writer.shared)
            self.assertGreater(writer.fence, one.fence)
            self.assertIsNone(self.client.try_read_lock(self.key))
            with self.assertRaises(syncguard.AcquisitionTimeout):
                self.client.read_lock(self.key, timeout=BRIEF)
        self.assertEqual(self.rows(), 0)

    def test_permits_are_counted(self):
        semaphore = self.client.semaphore(self.key, 2)
        with semaphore.acquire() as one, semaphore.try_acquire() as two:
            self.assertEqual({one.permit, two.permit}, {1, 2})
            self.assertIsNone(semaphore.try_acquire())
            with self.assertRaises(syncguard.AcquisitionTimeout):
                semaphore.acquire(timeout=BRIEF)
            self.assertEqual(semaphore.in_use(), 2)
        self.assertEqual(semaphore.in_use(), 0)


class Errors(Locks):
    def test_a_timeout_is_a_timeout_error_that_says_what_to_do(self):
        with self.client.lock(self.key):
            with self.assertRaisesRegex(TimeoutError, "raise timeout") as caught:
                self.client.lock(self.key, timeout=BRIEF)
        error = caught.exception
        self.assertIsInstance(error, syncguard.AcquisitionTimeout)
        self.assertEqual((error.code, error.sqlstate, error.may_be_held), ("AcquisitionTimeout", None, None))
        self.assertNotIn(self.key, str(error))

    def test_the_servers_code_is_told(self):
        self.client.lock(self.key).release()  # The tables are known.
        self.sql.run("ALTER TABLE syncguard_locks RENAME TO away")
        try:
            with self.assertRaises(syncguard.Error) as caught:
                self.client.try_lock(self.key)
        finally:
            self.sql.run("ALTER TABLE away RENAME TO syncguard_locks")
        self.assertEqual(caught.exception.sqlstate, "42P01")
        with self.assertRaises(syncguard.ServiceUnavailable):
            syncguard.Client("postgresql://nobody@127.0.0.1:1/none", connection_timeout=2)

    def test_bad_input_is_a_value_error_before_anything_is_sent(self):
        refused = [
            lambda: self.client.lock("a\0b"),
            lambda: self.client.lock("\ud800"),
            lambda: self.client.lock(""),
            lambda: self.client.lock(b"bytes"),
            lambda: self.client.lock("k" * 513),
            lambda: self.client.lock(self.key, ttl=0),
            lambda: self.client.lock(self.key, ttl=-1),
            lambda: self.client.lock(self.key, ttl=math.nan),
            lambda: self.client.lock(self.key, ttl=math.inf),
            lambda: self.client.lock(self.key, ttl=10**12),
            lambda: self.client.lock(self.key, timeout="5"),
            lambda: self.client.lock(self.key, timeout=True),
            lambda: self.client.read_lock("a\0b"),
            lambda: self.client.lock_all("abc"),
            lambda: self.client.lock_all([]),
            lambda: self.client.lock_all([f"k{n}" for n in range(65)]),
            lambda: self.client.semaphore(self.key, 0),
            lambda: self.client.semaphore(self.key, 2**32 + 1),
            lambda: self.client.run_once(self.key, print),
            lambda: self.client.run_once(self.key, print, every=1, number=1),
            lambda: self.client.run_once(self.key, print, number=-1),
            lambda: self.client.run_once(self.key, print, number=2**64),
            lambda: syncguard.Client(URL + "\0"),
            lambda: syncguard.Client(URL, max_connections=0),
            lambda: syncguard.Client("nonsense"),
        ]
        for n, call in enumerate(refused):
            with self.subTest(n=n), self.assertRaises(ValueError) as caught:
                call()
            self.assertIsInstance(caught.exception, syncguard.InvalidArgument)
        self.assertEqual(self.rows(), 0)

    def test_a_closed_client_says_so(self):
        client = syncguard.Client(URL, schema=SCHEMA)
        guard = client.lock(self.key)
        self.assertTrue(client.close())
        self.assertTrue(guard.lost)
        for call in (client.lock, client.try_lock):
            with self.assertRaises(syncguard.Aborted):
                call(self.key)

    def test_a_token_ends_waits_on_every_thread(self):
        token, ended = syncguard.Token(), []

        def wait():
            try:
                self.client.lock(self.key, timeout=math.inf, token=token)
            except syncguard.Aborted:
                ended.append(1)

        with self.client.lock(self.key) as guard:
            threads = [threading.Thread(target=wait) for _ in range(3)]
            for thread in threads:
                thread.start()
            wait_until(lambda: self.waiters(self.key) > 0)
            self.assertFalse(token.cancelled)
            token.cancel()
            for thread in threads:
                thread.join()
            self.assertEqual((len(ended), token.cancelled, guard.held), (3, True, True))
            with self.assertRaises(syncguard.Aborted):
                self.client.lock(self.key, token=token)


class Signals(Locks):
    def test_ctrl_c_ends_the_wait_of_the_main_thread(self):
        threads = _thread._count()
        with self.client.lock(self.key) as guard:
            self.interrupt_when_waited_for(self.key)
            with self.assertRaises(KeyboardInterrupt):
                self.client.lock(self.key, timeout=math.inf)
            self.assertTrue(guard.held)
        self.doCleanups()
        self.client.try_lock(self.key).release()
        wait_until(lambda: _thread._count() <= threads)

    def test_a_handler_that_returns_lets_the_wait_go_on(self):
        seen = []
        before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(guard.release()))
        self.addCleanup(signal.signal, signal.SIGUSR1, before)
        guard = self.client.lock(self.key)
        self.interrupt_when_waited_for(self.key, signal.SIGUSR1)
        with self.client.lock(self.key, timeout=math.inf):
            self.assertEqual(seen, [True])

    def test_ctrl_c_ends_a_campaign_a_permit_and_the_wait_for_a_loss(self):
        with self.client.lock(self.key) as guard:
            self.interrupt_when_waited_for(self.key)
            with self.assertRaises(KeyboardInterrupt):
                self.client.elect(self.key, lambda term: self.fail("it is not won"))
            before = signal.signal(signal.SIGALRM, signal.default_int_handler)
            self.addCleanup(signal.signal, signal.SIGALRM, before)
            with self.assertRaises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                guard.wait_lost()

    def test_whoever_asks_is_told_who_has_a_key(self):
        owned = syncguard.Client(URL, schema=SCHEMA, owner="py:4711")
        self.assertIsNone(self.client.holder(self.key))
        with owned.lock(self.key, note="b\u00fccher") as guard:
            holder = self.client.holder(self.key)
            self.assertEqual((holder.fence, holder.owner, holder.note), (guard.fence, "py:4711", "b\u00fccher"))
            with self.assertRaises(syncguard.AcquisitionTimeout) as failed:
                self.client.lock(self.key, timeout=2)
            self.assertIn("held by py:4711 (b\u00fccher) under fencing token", str(failed.exception))
        with self.client.lock(self.key):
            self.assertEqual(self.client.holder(self.key)[2:], (None, None))
        with self.assertRaises(syncguard.InvalidArgument):
            owned.lock(self.key, note="x" * 1025)
        owned.close()

    def test_ctrl_c_in_a_term_or_a_job_ends_it(self):
        def interrupted(_held):
            signal.raise_signal(signal.SIGINT)

        with self.assertRaises(KeyboardInterrupt):
            self.client.elect(self.key, interrupted)
        self.assertIsNone(self.client.leader(self.key))
        with self.assertRaises(KeyboardInterrupt):
            self.client.run_once(self.key, interrupted, number=1)
        self.assertEqual(self.rows(), 0)
        self.assertTrue(self.client.run_once(self.key, lambda run: None, number=1).ran, "it was not marked")

    def test_signals_at_any_moment_leave_nothing_held(self):
        class Alarm(Exception):
            pass

        def alarm(number, frame):
            raise Alarm

        before = signal.signal(signal.SIGALRM, alarm)
        self.addCleanup(signal.signal, signal.SIGALRM, before)
        calls = [
            lambda: self.client.lock(self.key, timeout=60),
            lambda: self.client.try_lock(self.key),
            lambda: self.client.lock_all([self.key, "other"]),
            lambda: self.client.semaphore(self.key, 3).acquire(),
            lambda: self.client.elect(self.key, lambda term: term.number),
            lambda: self.client.run_once(self.key, lambda run: True, number=rounds + 1),
        ]
        interrupted, random_, rounds, durations = 0, random.Random(7), -1, []
        for call in calls:
            begin = time.monotonic()
            call()
            durations.append(time.monotonic() - begin)
        threads = _thread._count()
        for rounds in range(600):
            got = None  # A guard whose release was interrupted is released here, where no exception can be lost.
            try:
                try:
                    which = rounds % len(calls)
                    signal.setitimer(signal.ITIMER_REAL, max(random_.uniform(0, 2 * durations[which]), 1e-6))
                    got = calls[which]()
                    if isinstance(got, syncguard.Guard):
                        got.release()  # An exception in a finalizer would be lost: that is Python's rule.
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                interrupted += 1
        gc.collect()
        wait_until(lambda: self.rows() == 0)
        wait_until(lambda: _thread._count() <= threads)
        self.assertTrue(0 < interrupted < 600, interrupted)


class Leaders(Locks):
    def test_terms_follow_each_other_on_the_callers_thread(self):
        terms, threads = [], []

        def lead(term):
            terms.append(term)
            threads.append(threading.current_thread())
            self.assertTrue(term.held and term.remaining > 0 and not term.wait_lost(0.001))
            self.assertEqual(self.client.leader(self.key).term, term.number)
            self.assertEqual(transaction(self.sql, term.fence_sql()), "COMMIT")
            return len(terms) == 2 and "done"

        self.assertEqual(self.client.elect(self.key, lead), "done")
        self.assertLess(terms[0].number, terms[1].number)
        self.assertEqual(set(threads), {threading.current_thread()})
        self.assertIsNone(self.client.leader(self.key))
        for term in terms:
            self.assertTrue(term.lost and term.wait_lost() and term.remaining == 0)
            self.assertRaises(syncguard.Aborted, term.fence_sql)

    def test_a_thread_that_still_uses_a_term_does_not_touch_what_is_over(self):
        ended = []

        def lead(term):
            thread = threading.Thread(target=lambda: ended.append(term.wait_lost()))
            thread.start()
            return thread

        thread = self.client.elect(self.key, lead)
        thread.join()
        self.assertEqual(ended, [True])

    def test_an_exception_ends_the_term_and_goes_on(self):
        with self.assertRaises(ZeroDivisionError):
            self.client.elect(self.key, lambda term: 1 / 0)
        self.assertIsNone(self.client.leader(self.key))

    def test_another_thread_may_lead(self):
        got = []
        thread = threading.Thread(target=lambda: got.append(self.client.elect(self.key, lambda term: term.number)))
        thread.start()
        thread.join()
        self.assertEqual(got, [1])


class Jobs(Locks):
    def test_a_job_runs_once_per_slot(self):
        ran = self.client.run_once(self.key, lambda run: (run.slot, run.skipped, run.fence > 0, run.held), number=7)
        self.assertEqual(ran, syncguard.RunOnce("done", (7, 0, True, True)))
        self.assertEqual(self.client.run_once(self.key, self.fail, number=7).outcome, "already_done")
        with self.assertRaises(KeyError):
            self.client.run_once(self.key, lambda run: {}["no"], number=9)
        self.assertTrue(self.client.run_once(self.key, lambda run: run.skipped, number=9).ran)
        with self.client.lock(self.key):
            self.assertEqual(self.client.run_once(self.key, self.fail, number=10).outcome, "running")

    def test_a_period_is_the_servers(self):
        day = timedelta(days=1)
        runs = []
        self.assertTrue(self.client.run_once(self.key, runs.append, every=day).ran)
        self.assertEqual(runs[0].period_start_ms, runs[0].slot * 86_400_000)
        self.assertFalse(runs[0].held)
        self.assertRaises(syncguard.Aborted, runs[0].completion_sql)

    def test_a_slot_that_is_claimed_does_not_run_again_after_a_failure(self):
        with self.assertRaises(ZeroDivisionError):
            self.client.run_once(self.key, lambda run: 1 / 0, number=1, claim_at_start=True)
        self.assertFalse(self.client.run_once(self.key, self.fail, number=1).ran)

    def test_effects_and_mark_are_one_transaction(self):
        self.sql.run("DELETE FROM effects")

        def job(run, end="COMMIT"):
            self.assertEqual(transaction(self.sql, run.completion_sql(), end), end)

        with self.assertRaisesRegex(syncguard.Aborted, "^the job ran"):
            self.client.run_once(self.key, lambda run: job(run, "ROLLBACK"), number=1)
        self.assertTrue(self.client.run_once(self.key, job, number=1).ran)
        self.assertFalse(self.client.run_once(self.key, job, number=1).ran)
        self.assertEqual(self.sql.run("SELECT count(*) FROM effects"), "1")


def transaction(sql, check, end="COMMIT"):
    """How a transaction ends that begins with this."""
    sql.run("BEGIN")
    sql.run(check)
    sql.run("INSERT INTO effects VALUES (1)")
    return sql.run(end)


class Fences(Locks):
    def test_a_late_transaction_cannot_commit(self):
        self.sql.run("DELETE FROM effects")
        with self.client.lock(self.key + "'\\%s") as guard:
            check = guard.fence_sql()
            self.assertEqual(transaction(self.sql, check), "COMMIT")
        self.assertEqual(transaction(self.sql, check), "ROLLBACK")
        self.assertEqual(self.sql.run(check), "22P02")
        self.assertEqual(self.sql.run("SELECT count(*) FROM effects"), "1")
        self.assertRaises(syncguard.Aborted, guard.fence_sql)


class Processes(Locks):
    def run_program(self, text, *arguments, **more):
        program = [sys.executable, "-W", "error", "-c", textwrap.dedent(text), URL, SCHEMA, *arguments]
        return subprocess.run(program, capture_output=True, text=True, timeout=LIMIT, **more)

    def test_a_program_that_ends_lets_its_locks_go(self):
        for ending in ("pass", "sys.exit(0)", "holder.append(holder)", "threading.Thread(target=holder.clear).start()"):
            with self.subTest(ending=ending):
                done = self.run_program(f"""
                    import sys, threading, syncguard
                    holder = [syncguard.Client(sys.argv[1], schema=sys.argv[2]).lock("ends")]
                    holder[0].on_lost(print)
                    {ending}
                """)
                self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))
                self.assertEqual(self.rows(), 0)

    def test_a_fork_leaves_the_parents_lock_alone(self):
        done = self.run_program("""
            import os, sys, syncguard
            client = syncguard.Client(sys.argv[1], schema=sys.argv[2])
            guard = client.lock("forked")
            child = os.fork()
            if child == 0:
                assert guard.lost
                try:
                    client.try_lock("other")
                except syncguard.InvalidArgument as error:
                    assert "fork" in str(error)
                    sys.exit(0)  # with the finalizers, in the child
                sys.exit(1)
            assert os.waitpid(child, 0)[1] == 0
            assert guard.held and client.try_lock("forked") is None
        """)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_a_script_that_waits_dies_of_ctrl_c_as_scripts_do(self):
        with self.client.lock("script"):
            text = 'import sys, syncguard; syncguard.Client(sys.argv[1], schema=sys.argv[2]).lock("script", timeout=1e6)'
            script = subprocess.Popen(
                [sys.executable, "-c", text, URL, SCHEMA], stderr=subprocess.PIPE, text=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
            wait_until(lambda: self.waiters("script") > 0)
            script.send_signal(signal.SIGINT)
            _, said = script.communicate(timeout=LIMIT)
        self.assertEqual(script.returncode, -signal.SIGINT)
        self.assertTrue(said.rstrip().endswith("KeyboardInterrupt"), said)

    def test_a_missing_library_is_an_import_error_that_says_what_to_do(self):
        done = self.run_program("import syncguard", env={**os.environ, "SYNCGUARD_LIBRARY": "/no/such/file.so"})
        self.assertIn("scripts/install-c", done.stderr)


del Locks  # It has no tests of its own.

if __name__ == "__main__":
    unittest.main()

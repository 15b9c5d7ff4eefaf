"""What cycles, renewals and sessions need of a server in bytes, which hardly depends on what else the machine does: run by
scripts/scale, by the library's C interface. Prints JSON."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "ffi", "python"))
import syncguard  # noqa: E402

URL, BIN = sys.argv[1], sys.argv[2]


def ask(sql):
    """The one line that the server answers."""
    psql = [shutil.which("psql", path=BIN) or "psql", URL, "-AtqX", "-v", "ON_ERROR_STOP=1", "-c", sql]
    return subprocess.run(psql, check=True, capture_output=True, text=True).stdout.strip()


def wal():
    return int(float(ask("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')")))


def rows():
    return int(ask("SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'syncguard_locks'") or 0)


def cycles(client, count):
    """WAL per acquire and release of a free key, after the first time that each page is written."""
    for n in range(400):
        client.lock(f"cycle{n % 200}").release()
    before = wal()
    for n in range(count):
        client.lock(f"cycle{n % 200}").release()
    return (wal() - before) / count


def renewals(client, guards, seconds):
    """WAL per renewed lease, where so many are due together."""
    held = [client.lock(f"renewed{guards}-{n}", ttl=3) for n in range(guards)]
    time.sleep(4)  # Each once at least; and the statistics are a second late.
    before = (wal(), rows())
    time.sleep(seconds)
    after = (wal(), rows())
    for guard in held:
        guard.release()
    return {"guards": guards, "wal_bytes": (after[0] - before[0]) / max(after[1] - before[1], 1)}


def memory():
    """Of the largest session, what it shares with no other process, in MiB."""
    pids = ask("SELECT string_agg(pid::text, ' ') FROM pg_stat_activity WHERE application_name = 'syncguard'").split()
    own = [int(re.search(r"RssAnon:\s+(\d+)", open(f"/proc/{pid}/status").read())[1]) / 1024 for pid in pids]
    return max(own)


client = syncguard.Client(URL)
found = {"cycle_wal_bytes": cycles(client, 2000), "renewals": [renewals(client, guards, 10) for guards in (10, 100, 500)]}
found["session_mib"] = memory()
client.close()
print(json.dumps(found, indent=1))

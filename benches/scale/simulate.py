"""A small simulation of clients, processors, wake-ups and a disk that commits in groups: run by scripts/scale.

It is fitted to two measured points of docs/performance.md and shown to reproduce the others before it says anything about
machines that were not measured. What it knows nothing of is said in docs/scale.md. Prints the tables of that page."""

import heapq
import itertools
import json
import random
import re
import sys

PAGE, SOAK, MEASURED = open(sys.argv[1]).read(), open(sys.argv[2]).read(), json.load(open(sys.argv[3]))


def absolute(row, side="ours"):
    """What a row of docs/performance.md says in its last column, in µs."""
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {row} |"))
    return float(re.search(rf"{side} (\d+) µs", line)[1])


def largest_session():
    """What docs/soak.md found of the largest session at the end of its hour, in MiB."""
    line = next(line for line in SOAK.splitlines() if line.startswith("| server: own memory of the largest session |"))
    return float(re.search(r"([\d.]+) MiB", line.split("|")[3])[1])


class Machine:
    """Threads that lock and unlock keys of their own as fast as they can. Times in µs.

    A processor does one thing at a time, in the order of asking. A message wakes a process: that costs a processor `wake`,
    and where one was idle it takes `idle` longer until it runs. The disk writes for all that have asked by then."""

    def __init__(self, processors, server, client, wake, idle, flush, line=0.0, clients_apart=False):
        self.processors, self.line, self.flush = processors, line, flush
        self.apart, self.wake, self.idle = clients_apart, wake, idle
        acquire = 0.62 * server  # Of the server's time of a cycle: acquire 75 of 121 µs.
        self.steps = [("client", client / 2), ("server", acquire), ("disk", 0), ("client", client / 2),
                      ("server", server - acquire)]
        self.now, self.events, self.order = 0.0, [], itertools.count()
        self.busy, self.waiting = [False] * processors, [[] for _ in range(processors)]
        self.flushing, self.unflushed, self.done, self.chance = False, [], 0, random.Random(1)

    def later(self, after, call, *arguments):
        heapq.heappush(self.events, (self.now + after, next(self.order), call, arguments))

    def run(self, threads, until=400_000.0):
        for n in range(threads):
            self.later(n * 7.0, self.step, n, 0)
        warm = None
        while self.now < until:
            self.now, _, call, arguments = heapq.heappop(self.events)
            call(*arguments)
            if warm is None and self.now > until / 4:
                warm = (self.now, self.done)
        return (self.now - warm[0]) / max(self.done - warm[1], 1)

    def step(self, thread, n):
        if n == len(self.steps):
            self.done, n = self.done + 1, 0
        where, time = self.steps[n]
        if where == "disk":
            self.unflushed.append((thread, n))
            return self.start_flush()
        if where == "client" and self.apart:
            return self.later(self.line + time, self.step, thread, n + 1)
        # A process stays where it was, a client and its server process apart, as the kernel spreads them.
        processor = (thread + (where == "server")) % self.processors
        self.later(self.line, self.ask, processor, time + self.wake, thread, n)

    def ask(self, processor, time, thread, n):
        asleep = not self.busy[processor] and not self.waiting[processor]
        self.later(self.idle if asleep else 0.0, self.queue, processor, time, thread, n)

    def queue(self, processor, time, thread, n):
        self.waiting[processor].append((time, thread, n))
        self.serve(processor)

    def serve(self, processor):
        if self.waiting[processor] and not self.busy[processor]:
            time, thread, n = self.waiting[processor].pop(0)
            self.busy[processor] = True
            # Interrupted, out of its cache, or not: exponential.
            self.later(self.chance.expovariate(1 / time), self.served, processor, thread, n)

    def served(self, processor, thread, n):
        self.busy[processor] = False
        self.serve(processor)
        self.step(thread, n + 1)

    def start_flush(self):
        if not self.flushing and self.unflushed:
            self.flushing, group, self.unflushed = True, self.unflushed, []
            self.later(self.flush, self.flushed, group)

    def flushed(self, group):
        self.flushing = False
        for thread, n in group:
            self.step(thread, n + 1)
        self.start_flush()


SERVER = absolute("server's processor time per cycle / floor")
CLIENT = absolute("client's processor time per cycle / floor")
POINTS = {n: absolute(f"acquire + release / floor, {n} thread{'s' if n > 1 else ''}, socket") for n in (1, 2, 4, 8, 16)}
ALONE = absolute("acquire + release / floor, 1 thread, socket, one processor")
# On one processor nothing is idle and no other is woken: what is left is the disk.
FLUSH = max(ALONE - SERVER - CLIENT, 5.0)


def measured_machine(wake, idle):
    return Machine(2, SERVER, CLIENT, wake, idle, FLUSH)


def fit():
    """What a wake-up costs, by the point with sixteen threads; how long an idle processor sleeps on, by that with one."""
    wake = min((abs(measured_machine(w, 10.0).run(16) - POINTS[16]), w) for w in [n * 0.5 for n in range(80)])[1]
    idle = min((abs(measured_machine(wake, i).run(1) - POINTS[1]), i) for i in [n * 1.0 for n in range(80)])[1]
    return wake, idle


def number(value):
    return f"{value:,.0f}"


def main():
    wake, idle = fit()
    print(f"Fitted: a wake-up costs {wake:.1f} µs of a processor, an idle one runs {idle:.0f} µs later, the disk takes {FLUSH:.0f} µs.\n")
    print("| threads, socket, two processors | measured, µs per cycle | simulated | difference | |\n| ---: | ---: | ---: | ---: | --- |")
    for threads, measured in POINTS.items():
        simulated = measured_machine(wake, idle).run(threads)
        role = "fitted to" if threads in (1, 16) else "predicted"
        print(f"| {threads} | {measured:.0f} | {simulated:.0f} | {100 * (simulated / measured - 1):+.0f} % | {role} |")
    print("\n| cycles per second of a server alone on its machine; clients 0.2 ms away | disk 0.03 ms | disk 0.5 ms | disk 2 ms |\n| --- | ---: | ---: | ---: |")
    for processors in (2, 4, 8, 16, 32):
        cells = []
        for flush in (30.0, 500.0, 2000.0):
            machine = Machine(processors, SERVER, CLIENT, wake, idle, flush, line=100.0, clients_apart=True)
            cells.append(number(1e6 / machine.run(64 * processors, until=200_000.0)))
        print(f"| {processors} processors, {64 * processors} threads | {' | '.join(cells)} |")
    renewals(10_000, 100)


def renewals(clients, guards):
    """What it costs to keep so many guards: their part of a pass over 10,000, and a message's part of a commit."""
    line = next(line for line in PAGE.splitlines() if line.startswith("| one pass over 10,000 renewed leases, socket, in s |"))
    lease, message = float(line.split("|")[2]) * 1e6 / 10_000, absolute("extend / one durable prepared update")
    wal = {found["guards"]: found["wal_bytes"] for found in MEASURED["renewals"]}
    each = lease + message / guards
    print(f"\nA renewal takes {lease:.1f} µs in a pass over 10,000, client and server together, and a message about {message:.0f} µs beside that: {each:.1f} µs each where {guards} go together.")
    print("\n| leases due together | bytes of WAL per renewed lease, measured |\n| ---: | ---: |")
    for found, size in wal.items():
        print(f"| {found} | {size:.0f} |")
    print(f"\n| {clients:,} clients with {guards} guards each | renewals per second | messages per second | processors busy, at most | WAL of all renewals, MB per second |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for ttl in (10, 30, 60, 300):
        rate = clients * guards / (ttl / 3)
        print(f"| ttl {ttl} s, renewed every {ttl / 3:.3g} s | {number(rate)} | {number(rate / guards)} | {rate * each / 1e6:.1f} | {rate * wal[guards] / 1e6:.0f} |")
    mib, largest = MEASURED["session_mib"], largest_session()
    print("\n| a session of the server: memory that it shares with no other process | MiB per session | "
          f"{clients:,} clients with one session each, GiB | with eleven each, GiB |\n| --- | ---: | ---: | ---: |")
    for what, size in (("after locks and renewals, measured here", mib),
                       ("the largest after [an hour of everything](soak.md)", largest)):
        print(f"| {what} | {size:.1f} | {number(clients * size / 1024)} | {number(11 * clients * size / 1024)} |")
    print(f"\nA cycle, which is an acquire and its release, writes {MEASURED['cycle_wal_bytes']:.0f} bytes of WAL: at 10,000 cycles per second {MEASURED['cycle_wal_bytes'] / 100:.1f} MB per second.")


main()

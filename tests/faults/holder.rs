//! The worker process of a storm: threads that lock, believe, write and let go, and print all of it. What they do
//! beside plain locks: [`kinds`](crate::kinds).

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use postgres::{Client, Transaction};
use syncguard::{
    AcquireResult, Acquired, CancelToken, ExtendResult, Heartbeat, LockError, LockGuard, LockOptions,
    PgLockClient,
};

use crate::history::{MS, now};
use crate::registers::{connect, write_fenced, write_kept};
use crate::support::worker::{self, Parent};
use crate::told::{as_ns, extended, granted, released, shown};

/// Does nothing but in a process that a storm has started.
#[test]
fn a_holder_outside_of_a_storm_does_nothing() {
    worker::part("holder", run);
}

fn run(parent: &Parent) {
    let number = |name: &str| parent.arg(name).parse::<u64>().expect("a number");
    let operation = Duration::from_millis(number("operation"));
    let kinds = number("kinds") == 1;
    let process = number("process");
    let mut builder = PgLockClient::builder();
    // Some clients say who they are, and some do not.
    if kinds && process % 2 == 1 {
        builder = builder.owner(process.to_string());
    }
    let client = builder
        .max_connections(u32::try_from(number("pool")).unwrap_or(1))
        .operation_timeout(operation)
        .connection_timeout(operation)
        .dispose_timeout(operation)
        .auto_create_tables(false)
        // Whatever the session's search path.
        .schema("public")
        .connect(&parent.arg("url"))
        .expect("nothing is sent yet");
    let (stop, fenced, practises) = (AtomicBool::new(false), number("fenced") == 1, number("practice") == 1);
    let (next, direct, over) = (AtomicU64::new(0), parent.arg("direct"), CancelToken::new());
    let seed = number("seed");
    parent.say("ready");
    thread::scope(|scope| {
        for n in 0..number("threads") {
            let (client, stop, next, direct, over) = (&client, &stop, &next, &direct, &over);
            scope.spawn(move || {
                let random =
                    Random(seed.wrapping_mul(1000).wrapping_add(n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
                let mut holder = Holder {
                    stalled: Cell::new(0),
                    process,
                    noted: Cell::new(None),
                    named: RefCell::default(),
                    parent,
                    client,
                    next,
                    direct,
                    fenced,
                    kinds,
                    in_order: kinds && n == 0,
                    over,
                    operation,
                    random,
                    sql: None,
                };
                while !stop.load(Ordering::SeqCst) {
                    holder.cycle();
                    if practises && holder.random.below(6) == 0 {
                        holder.practise(&format!("practice{}-{n}", std::process::id()));
                    }
                }
            });
        }
        parent.hear();
        stop.store(true, Ordering::SeqCst);
        over.cancel();
    });
    let closed = client.close(Duration::from_secs(5));
    drop(client);
    // The main thread, the test's, and the one that listens to the parent.
    let mut threads = 0;
    crate::support::wait::poll(Duration::from_secs(3), || {
        threads = std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
        threads <= 3
    });
    parent.say(&format!(
        "closed {} {threads}",
        closed.is_ok_and(|report| report.threads_ended && report.calls == 0)
    ));
}

/// A xorshift: the storm's choices depend on its seed alone.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n.max(1)
    }
}

pub struct Holder<'a> {
    pub parent: &'a Parent,
    pub client: &'a PgLockClient,
    pub next: &'a AtomicU64,
    /// How long this thread had waited for a processor when its last call began.
    pub stalled: Cell<u64>,
    /// The number of this process, which is also its owner.
    pub process: u64,
    /// The number of the next call, if its note has it.
    pub noted: Cell<Option<u64>>,
    /// Who was named in the call: to be told with its end.
    pub named: RefCell<Vec<String>>,
    pub direct: &'a str,
    pub fenced: bool,
    /// Whether it takes sets and permits, campaigns and runs jobs, too.
    pub kinds: bool,
    /// Whether it waits in order most of the time: one thread of each process does, so that there are waiters.
    pub in_order: bool,
    /// Fires when the storm is over: a campaign has no limit.
    pub over: &'a CancelToken,
    /// The limit of every single operation.
    pub operation: Duration,
    pub random: Random,
    pub sql: Option<Client>,
}

impl Holder<'_> {
    fn cycle(&mut self) {
        if self.in_order && self.random.below(6) > 0 {
            self.wait_in_order();
            return;
        }
        if self.kinds && self.random.below(2) == 0 {
            self.kind();
            return;
        }
        if self.random.below(4) == 0 {
            self.patient();
            return;
        }
        let key = match self.random.below(10) {
            0 if self.kinds => self.key_of_a_kind(),
            0..6 => format!("hot{}", self.random.below(3)),
            // One that nobody has used before: there is no row and no counter.
            _ => format!("slot{}", now() / (150 * MS)),
        };
        let ttl = self.ttl();
        if self.random.below(4) == 0 {
            self.single(&key, ttl);
        } else {
            self.guarded(&key, ttl);
        }
        thread::sleep(Duration::from_millis(1 + self.random.below(12)));
    }

    pub fn ttl(&mut self) -> Duration {
        Duration::from_millis([300, 600, 1500][usize::try_from(self.random.below(3)).unwrap_or(0)])
    }

    /// The operations without a guard.
    fn single(&mut self, key: &str, ttl: Duration) {
        let sent = now();
        let result = self.acquire(key, ttl);
        let Ok(AcquireResult::Acquired(lease)) = result else { return };
        let (fence, mut end) = (lease.fence.get(), sent + as_ns(ttl));
        for _ in 0..self.random.below(12) {
            if !self.believe(key, fence, ttl, || now() < end) {
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
        let mut longest = ttl;
        for _ in 0..self.random.below(4) {
            let asked = self.asked(ttl);
            longest = longest.max(asked);
            if !self.extend((key, &lease), (asked, longest), &mut end) {
                break;
            }
            for _ in 0..self.random.below(40) {
                if !self.believe(key, fence, ttl, || now() < end) {
                    break;
                }
                thread::sleep(Duration::from_millis(10));
            }
        }
        let _ = self.op(
            ("release", key, fence, ttl),
            self.operation,
            || self.client.release(&lease.lock_id),
            released,
        );
    }

    /// Extends without a guard, and counts until when the lease is certain; `false`: it is lost.
    fn extend(
        &self,
        (key, lease): (&str, &Acquired),
        (asked, longest): (Duration, Duration),
        end: &mut u64,
    ) -> bool {
        let sent = now();
        // Whatever becomes of a message that shortens the lease: it may be carried out.
        *end = (*end).min(sent + as_ns(asked));
        let result = self.op(
            ("extend", key, lease.fence.get(), asked),
            self.operation,
            || self.client.extend(&lease.lock_id, asked),
            |result| extended(result, asked, longest),
        );
        match result {
            Ok(ExtendResult::Extended { .. }) => *end = sent + as_ns(asked),
            Ok(ExtendResult::NotHeld) => return false,
            Err(_) => {}
        }
        true
    }

    /// Shortens a lease, then lengthens it, and holds it to its end: so long that a late copy of the first
    /// would give it to another one of these.
    fn patient(&mut self) {
        let (key, ttl) = (format!("long{}", self.random.below(3)), Duration::from_millis(1500));
        let (shorter, longer) = (ttl / 5, ttl * 2);
        if self.random.below(3) > 0 {
            let sent = now();
            let Ok(AcquireResult::Acquired(lease)) = self.acquire(&key, ttl) else { return };
            let (fence, mut end) = (lease.fence.get(), sent + as_ns(ttl));
            let extended = self.extend((&key, &lease), (shorter, ttl), &mut end)
                && self.extend((&key, &lease), (longer, longer), &mut end);
            while extended && self.believe(&key, fence, longer, || now() < end) {
                thread::sleep(Duration::from_millis(10));
            }
            let release = || self.client.release(&lease.lock_id);
            let _ = self.op(("release", &key, fence, longer), self.operation, release, released);
            return;
        }
        let heartbeat = if self.random.below(2) == 0 { Heartbeat::Off } else { Heartbeat::Auto };
        let Ok(guard) = self.lock(&key, (ttl, self.operation / 4), heartbeat) else { return };
        let fence = guard.fence().get();
        for asked in [shorter, longer] {
            let extend = ("extend", key.as_str(), fence, asked);
            let call = || guard.extend(asked);
            let _ = self.op(extend, self.operation, call, |result| extended(result, asked, longer));
        }
        for _ in 0..300 {
            if !self.believe(&key, fence, longer, || guard.is_held()) {
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
        let _ = self.op(("release", &key, fence, ttl), self.operation, || guard.release(), released);
    }

    /// For how long a lease is to be extended: the same, or shorter, or longer.
    pub fn asked(&mut self, ttl: Duration) -> Duration {
        [ttl, ttl / 5, ttl * 2][usize::try_from(self.random.below(3)).unwrap_or(0)]
    }

    /// Every call often, on a key of its own, until one fails: from the sixteenth on, on one connection, they
    /// go by the driver's own prepared statements.
    fn practise(&mut self, key: &str) {
        for _ in 0..40 {
            let ttl = Duration::from_millis(300);
            if !self.practised(key, ttl) || self.kinds && !self.practised_kinds(key, ttl) {
                return;
            }
        }
    }

    fn practised(&self, key: &str, ttl: Duration) -> bool {
        let result = self.acquire(key, ttl);
        let Ok(AcquireResult::Acquired(lease)) = result else { return false };
        let fence = lease.fence.get();
        let extended = self.op(
            ("extend", key, fence, ttl),
            self.operation,
            || self.client.extend(&lease.lock_id, ttl),
            |result| extended(result, ttl, ttl),
        );
        let released = self.op(
            ("release", key, fence, ttl),
            self.operation,
            || self.client.release(&lease.lock_id),
            released,
        );
        extended.is_ok() && released.is_ok()
    }

    /// One attempt without a guard.
    fn acquire(&self, key: &str, ttl: Duration) -> Result<AcquireResult, LockError> {
        self.op(
            ("acquire", key, 0, ttl),
            self.operation,
            || self.client.acquire(key, ttl),
            |result| match result {
                Ok(AcquireResult::Acquired(it)) => granted(it.fence.get(), it.expires_at_ms, ttl),
                Ok(AcquireResult::Locked) => "refused".to_owned(),
                Err(error) => self.unknown(error),
            },
        )
    }

    /// A guard, or not, after at most this time.
    fn lock(
        &mut self,
        key: &str,
        (ttl, wait): (Duration, Duration),
        heartbeat: Heartbeat,
    ) -> Result<LockGuard, LockError> {
        let options = LockOptions::new().ttl(ttl).timeout(wait).heartbeat(heartbeat);
        let options = self.noted(options, 4);
        self.op(
            ("acquire", key, 0, ttl),
            wait,
            || self.client.lock_with(key, &options),
            |result| match result {
                Ok(guard) => granted(guard.fence().get(), guard.expires_at_ms(), ttl),
                Err(error) => self.unknown(error),
            },
        )
    }

    pub fn guarded(&mut self, key: &str, ttl: Duration) {
        let (heartbeat, wait) = (self.heartbeat(), self.wait());
        if let Ok(guard) = self.lock(key, (ttl, wait), heartbeat) {
            self.keep(guard, ttl);
        }
    }

    pub fn heartbeat(&mut self) -> Heartbeat {
        if self.random.below(4) == 0 || !self.fenced { Heartbeat::Off } else { Heartbeat::Auto }
    }

    pub fn wait(&mut self) -> Duration {
        // With all of its time a call has nothing to state beside its statement.
        if self.random.below(2) == 0 { self.operation } else { self.operation * 4 / 7 }
    }

    /// Holds it for a while, and lets go of it in one of the ways that there are.
    pub fn keep(&mut self, guard: LockGuard, ttl: Duration) {
        self.hold(&guard, ttl);
        let (key, fence) = (shown(guard.key()), guard.fence().get());
        match self.random.below(12) {
            0 => drop(guard.leak()),
            1 => drop(guard),
            _ => {
                let _ = self.op(("release", &key, fence, ttl), self.operation, || guard.release(), released);
            }
        }
    }

    /// What a holder does: looks whether it still is one, writes, extends.
    fn hold(&mut self, guard: &LockGuard, ttl: Duration) {
        let (key, fence) = (shown(guard.key()), guard.fence().get());
        let rounds = self.rounds();
        let mut longest = ttl;
        for _ in 0..rounds {
            if !self.believe(&key, fence, ttl, || guard.is_held()) {
                // Late work, as of a holder that does not look: the register must refuse it.
                self.write(guard, ttl);
                return;
            }
            match self.random.below(30) {
                0..4 => self.write(guard, ttl),
                4..6 => {
                    let asked = self.asked(ttl);
                    longest = longest.max(asked);
                    let call = || guard.extend(asked);
                    let _ = self.op(("extend", &key, fence, asked), self.operation, call, |result| {
                        extended(result, asked, longest)
                    });
                }
                _ => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// How often a holder looks at what it has.
    pub fn rounds(&mut self) -> u64 {
        if self.random.below(8) == 0 { 150 } else { self.random.below(20) }
    }

    /// The time is taken before the look, so that no pause between them makes a belief of nothing.
    pub fn believe(&self, key: &str, fence: u64, ttl: Duration, holds: impl FnOnce() -> bool) -> bool {
        let at = now();
        let holds = holds();
        if holds {
            self.parent.say(&format!("H {key} {fence} {} {at}", ttl.as_nanos()));
        }
        holds
    }

    fn write(&mut self, guard: &LockGuard, ttl: Duration) {
        let in_transaction = self.random.below(2) == 0;
        let (key, fence) = (shown(guard.key()), guard.fence().get());
        let register = format!("{}:{key}", if in_transaction { "T" } else { "F" });
        // Where no fence protects, a nap that outlives lease and tolerance does the damage of a pause.
        let longest = if self.fenced || in_transaction { 25 } else { 2500 };
        let nap = Duration::from_millis(self.random.below(longest));
        let fenced = self.fenced;
        self.write_to(&register, (fence, ttl), |sql| {
            if in_transaction {
                write_fenced(sql, |transaction| guard.fence_transaction(transaction), &register, nap)
            } else {
                write_kept(sql, &register, fence, nap, fenced)
            }
        });
    }

    /// A write to a register, in a fenced transaction.
    pub fn write_under(
        &mut self,
        key: &str,
        under: (u64, Duration),
        fence: impl FnOnce(&mut Transaction<'_>) -> syncguard::Result<()>,
    ) {
        let (register, nap) = (format!("T:{key}"), Duration::from_millis(self.random.below(25)));
        self.write_to(&register, under, |sql| write_fenced(sql, fence, &register, nap));
    }

    fn write_to(
        &mut self,
        register: &str,
        (fence, ttl): (u64, Duration),
        write: impl FnOnce(&mut Client) -> Result<Option<u64>, postgres::Error>,
    ) {
        let mut sql = self.connection();
        let call = || sql.as_mut().map(write);
        let written =
            self.op(("write", register, fence, ttl), Duration::ZERO, call, |written| match written {
                Some(Ok(Some(value))) => format!("ok {value}"),
                Some(Ok(None)) => "refused".to_owned(),
                Some(Err(_)) => "unknown -".to_owned(),
                None => "Unconnected".to_owned(),
            });
        self.sql = sql.filter(|_| matches!(written, Some(Ok(_))));
    }

    /// The holder's own connection, which is not the library's.
    pub fn connection(&mut self) -> Option<Client> {
        self.sql.take().or_else(|| connect(self.direct))
    }
}

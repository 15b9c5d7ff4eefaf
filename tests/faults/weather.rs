//! The faults of a storm: how each is brought about, and undone.

use std::thread;
use std::time::Duration;

use postgres::{Client, NoTls};

use crate::history::{Blocked, MS, Pause, now};
use crate::holder::Random;
use crate::storm::{Workers, lock};
use crate::support::cluster::setting;
use crate::support::{Action, Network, Proxy, Server, Stop};
use crate::zombies::calls;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Messages,
    LateCopies,
    SlowAnswers,
    Mute,
    Refusing,
    KillHolder,
    StopHolder,
    CrashServer,
    Terminate,
    Cancel,
    FreezeServer,
    LockTable,
    LockRow,
    MaxConnections,
    RoleSettings,
    NoStandby,
    Suspend,
    DiscardAll,
    TablesAnew,
    CancelCommit,
    SlowCommits,
    DiskFull,
    SetClock,
}

pub const ALL: [Fault; 23] = [
    Fault::Messages,
    Fault::LateCopies,
    Fault::KillHolder,
    Fault::StopHolder,
    Fault::CrashServer,
    Fault::Terminate,
    Fault::Mute,
    Fault::LockRow,
    Fault::Cancel,
    Fault::SlowAnswers,
    Fault::NoStandby,
    Fault::FreezeServer,
    Fault::LockTable,
    Fault::Refusing,
    Fault::MaxConnections,
    Fault::RoleSettings,
    Fault::Suspend,
    Fault::DiscardAll,
    Fault::TablesAnew,
    Fault::CancelCommit,
    Fault::SlowCommits,
    Fault::DiskFull,
    Fault::SetClock,
];

/// What is tried behind a pooler: copies come late between any two of the others, and while they last.
pub const POOLED: [Fault; 18] = [
    Fault::LateCopies,
    Fault::Messages,
    Fault::LateCopies,
    Fault::KillHolder,
    Fault::LateCopies,
    Fault::Terminate,
    Fault::LateCopies,
    Fault::StopHolder,
    Fault::LateCopies,
    Fault::Mute,
    Fault::LateCopies,
    Fault::LockRow,
    Fault::LateCopies,
    Fault::Refusing,
    Fault::LateCopies,
    Fault::SlowCommits,
    Fault::LateCopies,
    Fault::CrashServer,
];

impl Fault {
    pub fn name(self) -> &'static str {
        match self {
            Self::Messages => "single messages cut, delayed, swallowed, late",
            Self::LateCopies => "extends and renewals late, or once more",
            Self::SlowAnswers => "answers later than the ttl",
            Self::Mute => "network mute, then all arrives",
            Self::Refusing => "all connections cut, new ones refused",
            Self::KillHolder => "SIGKILL of a holder",
            Self::StopHolder => "SIGSTOP of a holder",
            Self::CrashServer => "server stopped at once and started",
            Self::Terminate => "pg_terminate_backend",
            Self::Cancel => "pg_cancel_backend",
            Self::FreezeServer => "server silent (SIGSTOP of all its processes)",
            Self::LockTable => "ACCESS EXCLUSIVE lock on the table",
            Self::LockRow => "a stranger holds a row past its expiry",
            Self::MaxConnections => "max_connections reached",
            Self::RoleSettings => "hostile settings of the role",
            Self::NoStandby => "absent synchronous standby",
            Self::Suspend => "host suspended (SIGSTOP of holders and server)",
            Self::DiscardAll => "DISCARD ALL on our sessions",
            Self::TablesAnew => "tables dropped and made anew, or rewritten",
            Self::CancelCommit => "COMMITs that wait for a standby cancelled",
            Self::SlowCommits => "slow commits",
            Self::DiskFull => "disk full",
            Self::SetClock => "server's clock set back and forth, within the tolerance",
        }
    }
}

impl Fault {
    /// Whether the server may lose what need not be on its disk, or has another clock, or tables that look empty to
    /// whoever began to read before they were made.
    pub fn unsettles(self) -> bool {
        matches!(self, Self::CrashServer | Self::DiskFull | Self::SetClock | Self::TablesAnew)
    }

    /// Whether clients may not reach the server, or not for as long as they try.
    pub fn keeps_away(self) -> bool {
        !matches!(
            self,
            Self::LateCopies
                | Self::KillHolder
                | Self::StopHolder
                | Self::LockRow
                | Self::DiscardAll
                | Self::SetClock
                | Self::SlowCommits
        )
    }
}

/// Calls of sets, permits, readers, runs, waiters in order and holders with notes that come late and twice like extends do, by name, and written out for a
/// pooler.
const KINDS: [&str; 27] = [
    "EXECUTE sg_join",
    "EXECUTE sg_found",
    "EXECUTE sg_leave",
    "EXECUTE sg_renew_shared",
    "joined AS (",
    "others AS MATERIALIZED",
    "AS want (key, grp",
    "EXECUTE sg_set_",
    "EXECUTE sg_permit_",
    "EXECUTE sg_begin_run",
    "EXECUTE sg_confirm_run",
    "EXECUTE sg_claim_run",
    "EXECUTE sg_finish_run",
    "EXECUTE sg_verify_run",
    "pg_catalog.bool_and(",
    "AS held WHERE EXISTS",
    "free AS MATERIALIZED",
    "todo AS MATERIALIZED",
    "FROM cur, t WHERE",
    "AND EXISTS (SELECT 1 FROM mark)",
    "EXECUTE sg_turn_",
    "EXECUTE sg_note_",
    "EXECUTE sg_announce",
    "EXECUTE sg_withdraw",
    "ahead AS MATERIALIZED",
    "noted AS (",
    "expires_at_ms, priority, note)",
];

pub struct Weather<'a> {
    server: &'a Server,
    proxy: &'a Proxy,
    random: Random,
    pub windows: Vec<(Fault, u64, u64)>,
    pub pauses: Vec<Pause>,
    pub blocked: Vec<Blocked>,
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

impl<'a> Weather<'a> {
    pub fn new(server: &'a Server, proxy: &'a Proxy, random: Random) -> Self {
        Self { server, proxy, random, windows: Vec::new(), pauses: Vec::new(), blocked: Vec::new() }
    }

    /// Brings it about, lets it last, undoes it, and leaves a moment of calm.
    pub fn inject(&mut self, fault: Fault, workers: &mut Workers<'_>) {
        let from = now();
        let lasting = self.random.below(1000);
        match fault {
            Fault::Messages => self.messages(),
            Fault::LateCopies => self.late_copies(),
            Fault::SlowAnswers => self.slow_answers(200, 680),
            Fault::Mute => {
                self.proxy.network(Network::Mute);
                thread::sleep(ms(300 + lasting));
                self.proxy.network(Network::Open);
            }
            Fault::Refusing => {
                self.proxy.network(Network::Refusing);
                self.proxy.cut_all();
                thread::sleep(ms(300 + lasting));
                self.proxy.network(Network::Open);
            }
            Fault::KillHolder => {
                workers.kill(usize::try_from(self.random.below(workers.members.len() as u64)).unwrap_or(0));
                thread::sleep(ms(lasting));
            }
            Fault::StopHolder => self.stop_holder(workers, ms(200 + 3 * lasting)),
            Fault::CrashServer => {
                self.server.restart(if lasting < 800 { Stop::Immediate } else { Stop::Kill });
                thread::sleep(ms(200));
            }
            Fault::Terminate => self.each_backend("pg_terminate_backend", lasting),
            Fault::Cancel => self.each_backend("pg_cancel_backend", lasting),
            Fault::FreezeServer => {
                self.server.freeze();
                thread::sleep(ms(300 + lasting));
                self.server.thaw();
            }
            Fault::LockTable => {
                let mut sql = self.server.client();
                let _ = sql.batch_execute("BEGIN; LOCK TABLE syncguard_locks IN ACCESS EXCLUSIVE MODE");
                thread::sleep(ms(300 + lasting));
            }
            Fault::LockRow => self.lock_row(),
            Fault::MaxConnections => {
                let open: Vec<Client> =
                    std::iter::from_fn(|| Client::connect(self.server.url(), NoTls).ok()).take(100).collect();
                // New ones are refused; those that are open go on.
                self.proxy.cut_all();
                thread::sleep(ms(200 + lasting));
                drop(open);
            }
            Fault::RoleSettings => self.role_settings(ms(500 + lasting)),
            Fault::NoStandby => {
                self.server.configure("synchronous_standby_names", "nobody");
                thread::sleep(ms(200 + lasting));
                self.server.configure("synchronous_standby_names", "");
            }
            Fault::Suspend => self.suspend(workers, ms(500 + 2 * lasting)),
            Fault::DiscardAll => {
                let mut random = Random(self.random.below(u64::MAX) | 1);
                self.proxy.on_query(
                    move |_| {
                        if random.below(2) == 0 { Action::DiscardAll } else { Action::Pass }
                    },
                );
                thread::sleep(ms(1000 + lasting));
                self.proxy.pass_all();
            }
            Fault::TablesAnew => self.tables_anew(),
            Fault::CancelCommit => self.cancel_commits(ms(300 + lasting)),
            Fault::SlowCommits => self.slow_commits(ms(500 + lasting)),
            Fault::DiskFull => self.disk_full(ms(300 + lasting)),
            Fault::SetClock => self.set_clock(),
        }
        self.windows.push(crate::storm::window(fault, from));
        thread::sleep(ms(150));
    }

    fn messages(&mut self) {
        let mut random = Random(self.random.below(u64::MAX) | 1);
        self.proxy.on_query(move |_| {
            if random.below(12) > 0 {
                return Action::Pass;
            }
            let n = usize::try_from(random.below(300)).unwrap_or(0);
            match random.below(8) {
                0 => Action::CutQueryAt(n),
                1 => Action::CutNow,
                2 | 3 => Action::CutAnswerAt(n),
                4 => Action::SwallowAnswer,
                5 => Action::DelayQuery(ms(random.below(900))),
                6 => Action::DelayAnswer(ms(random.below(900))),
                _ => Action::Zombie(Some(ms(100 + random.below(1500)))),
            }
        });
        thread::sleep(ms(2000));
        self.proxy.pass_all();
    }

    /// What changes the end of a lease, or takes or ends one of another kind, loses its answer. It comes seconds later, or at once and then once
    /// more: that lease may have been changed meanwhile, or be somebody else's.
    fn late_copies(&mut self) {
        let mut random = Random(self.random.below(u64::MAX) | 1);
        self.proxy.on_query(move |sql| {
            let kind = KINDS.iter().any(|name| sql.contains(name)) && !sql.contains("PREPARE");
            if !(calls("sg_extend", sql) || calls("sg_renew", sql) || kind) || random.below(3) > 0 {
                return Action::Pass;
            }
            let most = if random.below(2) == 0 { 600 } else { 3000 };
            let delay = ms(50 + random.below(most));
            if random.below(2) == 0 { Action::Zombie(Some(delay)) } else { Action::Twice(delay) }
        });
        thread::sleep(ms(2500));
        self.proxy.pass_all();
    }

    /// What was granted is known so late that the lease is over, or about to be.
    fn slow_answers(&mut self, least: u64, most: u64) {
        let mut random = Random(self.random.below(u64::MAX) | 1);
        self.proxy.on_query(move |sql| {
            let asks = [
                "EXECUTE sg_acquire",
                "EXECUTE sg_set_",
                "EXECUTE sg_permit_",
                "EXECUTE sg_begin_run",
                "EXECUTE sg_turn_a",
                "EXECUTE sg_note_",
            ];
            if asks.iter().any(|name| sql.contains(name)) && random.below(3) == 0 {
                Action::DelayAnswer(ms(least + random.below(most - least)))
            } else {
                Action::Pass
            }
        });
        thread::sleep(ms(2500));
        self.proxy.pass_all();
    }

    fn stop_holder(&mut self, workers: &Workers<'_>, lasting: Duration) {
        let member =
            &workers.members[usize::try_from(self.random.below(workers.members.len() as u64)).unwrap_or(0)];
        let from = now();
        lock(&member.worker).signal("STOP");
        thread::sleep(lasting);
        lock(&member.worker).signal("CONT");
        // A stopped process needs a moment to be scheduled again.
        self.pauses.push(Pause { process: member.process, from, to: now() + 20 * MS });
    }

    fn suspend(&mut self, workers: &Workers<'_>, lasting: Duration) {
        let from = now();
        self.server.freeze();
        for member in &workers.members {
            lock(&member.worker).signal("STOP");
        }
        thread::sleep(lasting);
        self.server.thaw();
        for member in &workers.members {
            lock(&member.worker).signal("CONT");
        }
        let to = now() + 20 * MS;
        self.pauses.extend(workers.members.iter().map(|member| Pause { process: member.process, from, to }));
    }

    fn each_backend(&mut self, function: &str, lasting: u64) {
        let mut sql = self.server.client();
        // Those that wait for something or work, and now and then all.
        let only = if lasting < 500 { "state <> 'idle'" } else { "true" };
        let query = format!(
            "SELECT {function}(pid) FROM pg_stat_activity WHERE application_name = 'syncguard' AND {only} AND random() < 0.5"
        );
        for _ in 0..30 {
            let _ = sql.batch_execute(&query);
            thread::sleep(ms(30));
        }
    }

    /// Holds the row of a hot key until its lease is over, tolerance included.
    fn lock_row(&mut self) {
        let clock = "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::int8";
        for _ in 0..3 {
            let mut sql = self.server.client();
            let mut transaction = sql.transaction().expect("the server answers");
            let found = transaction.query_opt(
                "SELECT key, expires_at_ms FROM syncguard_locks WHERE key LIKE 'hot%' \
                 AND expires_at_ms > extract(epoch FROM clock_timestamp()) * 1000 ORDER BY random() LIMIT 1 FOR UPDATE SKIP LOCKED",
                &[],
            );
            let Ok(Some(row)) = found else { continue };
            let from_ms: i64 = transaction.query_one(clock, &[]).expect("the server answers").get(0);
            thread::sleep(ms(500));
            let to_ms: i64 = transaction.query_one(clock, &[]).expect("the server answers").get(0);
            self.blocked.push(Blocked { key: row.get(0), from_ms, to_ms });
            drop(transaction);
        }
    }

    /// The tables that cached statements know are gone, and what was in them is in others of the same
    /// name; or it is in the same tables, rewritten.
    fn tables_anew(&mut self) {
        let mut sql = self.server.client();
        let _ = sql.batch_execute("SET lock_timeout = '2s'");
        for table in ["syncguard_locks", "syncguard_fence_counters", "syncguard_members"] {
            for _ in 0..3 {
                let _ = if self.random.below(2) == 0 {
                    sql.batch_execute(&format!("VACUUM FULL {table}"))
                } else {
                    let anew = format!(
                        "BEGIN; LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE; CREATE TABLE anew (LIKE {table} INCLUDING ALL); \
                         INSERT INTO anew SELECT * FROM {table}; DROP TABLE {table}; ALTER TABLE anew RENAME TO {table}; COMMIT"
                    );
                    sql.batch_execute(&anew)
                };
                let _ = sql.batch_execute("ROLLBACK");
                thread::sleep(ms(100));
            }
        }
    }

    /// Each answers "success" with a warning, although no standby has it.
    fn cancel_commits(&mut self, lasting: Duration) {
        let mut sql = self.server.client();
        self.server.configure("synchronous_standby_names", "nobody");
        let end = std::time::Instant::now() + lasting;
        while std::time::Instant::now() < end {
            let waiting = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
            let _ = sql.batch_execute(waiting);
            thread::sleep(ms(15));
        }
        self.server.configure("synchronous_standby_names", "");
    }

    /// Up to a tenth of a second each: shorter than any limit, longer than anybody expects.
    fn slow_commits(&self, lasting: Duration) {
        let settings =
            [("fsync", "on", "off"), ("commit_siblings", "0", "5"), ("commit_delay", "100000", "0")];
        settings.iter().for_each(|(name, slow, _)| self.server.configure(name, slow));
        thread::sleep(lasting);
        settings.iter().for_each(|(name, _, usual)| self.server.configure(name, usual));
    }

    /// The server ends when it cannot write its log: that, too.
    fn disk_full(&self, lasting: Duration) {
        if !crate::support::room::inside() {
            return;
        }
        let full = crate::support::room::Full::fill();
        let end = std::time::Instant::now() + lasting;
        // There are log files ahead, which need no more place.
        let mut sql = Client::connect(self.server.url(), NoTls).ok();
        while std::time::Instant::now() < end {
            let switched = sql.as_mut().map(|sql| {
                sql.batch_execute("SELECT pg_logical_emit_message(false, '', ''), pg_switch_wal()")
            });
            if switched.is_some_and(|done| done.is_err()) {
                sql = None;
            }
            thread::sleep(ms(50));
        }
        drop(full);
        self.server.revive();
    }

    /// Steps of less than the tolerance hurt nobody. Times that other rules compare are far away.
    fn set_clock(&mut self) {
        thread::sleep(ms(500));
        for _ in 0..6 {
            let ahead = self.random.below(900);
            self.server.set_clock(i64::try_from(ahead).unwrap_or(0) - 450);
            thread::sleep(ms(100 + self.random.below(400)));
        }
        self.server.set_clock(0);
        thread::sleep(ms(500));
    }

    fn role_settings(&mut self, lasting: Duration) {
        const HOSTILE: [(&str, &str); 7] = [
            ("default_transaction_read_only", "on"),
            ("default_transaction_isolation", "serializable"),
            ("statement_timeout", "40ms"),
            ("lock_timeout", "5ms"),
            ("idle_in_transaction_session_timeout", "10ms"),
            ("idle_session_timeout", "60ms"),
            ("synchronous_commit", "off"),
        ];
        let mut sql = self.server.client();
        for (name, value) in HOSTILE {
            // Not every version has every setting.
            let _ =
                sql.batch_execute(&format!("ALTER DATABASE postgres SET {}", setting(name, value).trim()));
        }
        self.proxy.cut_all();
        thread::sleep(lasting);
        let _ = sql.batch_execute("ALTER DATABASE postgres RESET ALL");
        self.proxy.cut_all();
    }
}

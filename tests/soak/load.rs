//! The process that is watched: three clients, on sessions of their own, on a caller's pool and over the socket, and threads
//! that do everything with them, at a rate that leaves a machine most of its time.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use postgres::NoTls;
use r2d2_postgres::PostgresConnectionManager;
use syncguard::{CancelToken, LockError, PgLockClient, PgLockClientBuilder, TelemetryOptions};

use crate::activities::ACTIVITIES;
use crate::memory::allocated;
use crate::samples::entries;
use crate::support::wait::poll;
use crate::support::worker::{self, Parent};

type Pool = r2d2::Pool<PostgresConnectionManager<NoTls>>;

/// Does nothing but in the process that a soak has started.
#[test]
fn a_load_outside_of_a_soak_does_nothing() {
    worker::part("load", run);
}

pub struct Load {
    pub clients: [PgLockClient; 3],
    pub url: String,
    /// Fires when the load is over.
    pub over: CancelToken,
    /// By activity: how often, by answer.
    done: Mutex<BTreeMap<&'static str, BTreeMap<String, u64>>>,
}

/// A thread's choices.
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    pub fn ms(&mut self, below: u64) -> Duration {
        Duration::from_millis(self.below(below))
    }
}

pub fn builder() -> PgLockClientBuilder {
    PgLockClient::builder().operation_timeout(Duration::from_secs(2)).create_members_table(true)
}

/// So that its sessions are found.
pub fn named(url: &str, name: &str) -> String {
    let separator = if url.contains('?') { '&' } else { '?' };
    format!("{url}{separator}application_name=soak-{name}")
}

impl Load {
    /// Any of them.
    pub fn client(&self, dice: &mut Dice) -> &PgLockClient {
        &self.clients[usize::try_from(dice.below(3)).unwrap_or(0)]
    }

    /// Counts an answer.
    pub fn note<T>(&self, activity: &'static str, result: &Result<T, LockError>) {
        let answer = result.as_ref().map_or_else(|error| error.code().to_string(), |_| "ok".to_owned());
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        *done.entry(activity).or_default().entry(answer).or_default() += 1;
    }

    fn total(&self) -> u64 {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        done.values().flat_map(BTreeMap::values).sum()
    }
}

fn run(parent: &Parent) {
    let (url, socket_url) = (parent.arg("url"), parent.arg("socket_url"));
    let before = usage();
    let manager = PostgresConnectionManager::new(named(&url, "callers").parse().unwrap(), NoTls);
    // Without ages: or its threads outlive it by the half minute after which they would look at them.
    let pool: Pool =
        r2d2::Pool::builder().max_size(6).idle_timeout(None).max_lifetime(None).build(manager).unwrap();
    let load = Load {
        clients: [
            builder().telemetry(TelemetryOptions::new(|_event| {})).connect(&named(&url, "tcp")).unwrap(),
            builder().build(pool.clone()).unwrap(),
            builder().connect(&named(&socket_url, "socket")).unwrap(),
        ],
        url,
        over: CancelToken::new(),
        done: Mutex::default(),
    };
    load.clients[0].setup_schema().unwrap();
    thread::scope(|scope| {
        let load = &load;
        for (n, (name, pause, activity)) in ACTIVITIES.iter().enumerate() {
            scope.spawn(move || {
                let mut dice = Dice(n as u64 * 7919 + 1);
                while !load.over.wait_timeout(*pause + dice.ms(80)) {
                    activity(load, name, &mut dice);
                }
            });
        }
        parent.say("ready");
        while parent.hear() == "sample" {
            let prepared = prepared(&pool).map_or_else(|| "?".to_owned(), |count| count.to_string());
            parent.say(&format!("{} {prepared} {}", load.total(), allocated()));
        }
        load.over.cancel();
    });
    end(parent, load, pool, before);
}

/// Threads and descriptors of this process.
fn usage() -> [f64; 2] {
    ["task", "fd"].map(|what| entries(&format!("/proc/self/{what}")).unwrap_or(0.0))
}

/// Closes everything, and says what is left of it.
fn end(parent: &Parent, load: Load, pool: Pool, before: [f64; 2]) {
    let Load { clients, done, url, .. } = load;
    for client in &clients {
        let closed = client.close(Duration::from_secs(10));
        assert!(closed.as_ref().is_ok_and(|report| report.threads_ended), "{closed:?}");
    }
    drop(clients);
    drop(pool);
    let mut left = [0.0; 2];
    poll(Duration::from_secs(20), || {
        let now = usage();
        left = [now[0] - before[0], now[1] - before[1]];
        left.iter().all(|left| *left <= 0.0)
    });
    // Leases that were left to run out are over by then; what the cleanup of an operator would take away.
    let mut sql = postgres::Client::connect(&url, NoTls).unwrap();
    let live =
        "SELECT count(*) FROM syncguard_locks WHERE expires_at_ms > extract(epoch FROM now()) * 1000 + 20000";
    let rows: i64 = sql.query_one(live, &[]).unwrap().get(0);
    for (name, answers) in &*done.lock().unwrap_or_else(PoisonError::into_inner) {
        let ok = answers.get("ok").copied().unwrap_or(0);
        let others = answers.iter().filter(|(answer, _)| *answer != "ok");
        let others: Vec<_> = others.map(|(answer, count)| format!("{answer} {count}")).collect();
        parent.say(&format!("did {name} ok={ok} {}", others.join(", ")));
    }
    parent.say(&format!("ended threads={} descriptors={} rows={rows}", left[0].max(0.0), left[1].max(0.0)));
}

/// How many statements a session of the caller's pool has prepared: the most of those that are free.
fn prepared(pool: &Pool) -> Option<i64> {
    let mut sessions = Vec::new();
    while let Some(session) = pool.try_get() {
        sessions.push(session);
    }
    let counts = sessions.iter_mut().filter_map(|session| {
        session.simple_query("SELECT count(*) FROM pg_prepared_statements").ok()?.into_iter().find_map(
            |message| match message {
                postgres::SimpleQueryMessage::Row(row) => row.get(0)?.parse().ok(),
                _ => None,
            },
        )
    });
    counts.max()
}

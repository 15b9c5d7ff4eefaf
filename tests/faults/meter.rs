//! What a cluster can do while it fails over, and what a client gets of it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use postgres::NoTls;
use syncguard::{LockError, LockOptions, PgLockClient};

use crate::history::{MS, Op, Outcome, What, now};
use crate::patroni::{NODES, config};

/// Writes one row by a durable commit, at each node, as fast as that goes: what the cluster itself can do.
pub struct Probe {
    stop: Arc<AtomicBool>,
    done: Arc<Mutex<Vec<u64>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Probe {
    pub fn start() -> Self {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let threads = (0..NODES).map(|n| {
            let (stop, done) = (Arc::clone(&stop), Arc::clone(&done));
            thread::spawn(move || {
                let (mut sql, warned) = (None, Arc::new(AtomicBool::new(false)));
                let connect = || {
                    let heard = Arc::clone(&warned);
                    let hear = move |_| heard.store(true, Ordering::SeqCst);
                    config(n).notice_callback(hear).connect(NoTls).ok()
                };
                while !stop.load(Ordering::SeqCst) {
                    sql = sql.or_else(&connect);
                    let write = "UPDATE probe SET n = n + 1 WHERE id = $1";
                    let written =
                        sql.as_mut().map(|sql| sql.execute(write, &[&i32::try_from(n).unwrap_or(0)]));
                    // A COMMIT whose wait for the standby was cancelled is done with a warning, and is not durable.
                    match written {
                        Some(Ok(_)) if warned.swap(false, Ordering::SeqCst) => {}
                        Some(Ok(_)) => done.lock().unwrap_or_else(PoisonError::into_inner).push(now()),
                        _ => sql = sql.filter(|sql| !sql.is_closed()),
                    }
                    thread::sleep(Duration::from_millis(10));
                }
            })
        });
        let threads = threads.collect();
        Self { stop, done, threads }
    }

    pub fn end(self) -> Vec<u64> {
        self.stop.store(true, Ordering::SeqCst);
        self.threads.into_iter().for_each(|thread| thread.join().expect("a probe does not fail"));
        let mut done = std::mem::take(&mut *self.done.lock().unwrap_or_else(PoisonError::into_inner));
        done.sort_unstable();
        done
    }
}

/// Takes keys that nobody else wants, all the time: when the cluster is back, a grant is a matter of milliseconds.
pub struct Meter {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Vec<Op>>>,
}

/// The options of the meter's calls: a web request's.
const METER_TTL: Duration = Duration::from_secs(3);
const METER_WAIT: Duration = Duration::from_secs(2);
/// Its number among the processes: the holders' begin with one.
pub const METER: u32 = 0;

impl Meter {
    pub fn start(url: &str) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let client = PgLockClient::connect(url).expect("the cluster takes connections");
        let threads = (0..3).map(|n| {
            let (stop, client) = (Arc::clone(&stop), client.clone());
            thread::spawn(move || {
                let mut ops = Vec::new();
                for turn in (0_u64..).take_while(|_| !stop.load(Ordering::SeqCst)) {
                    metered(&client, &format!("meter{n}-{}", turn % 200), &mut ops);
                    thread::sleep(Duration::from_millis(10));
                }
                ops
            })
        });
        Self { threads: threads.collect(), stop }
    }

    pub fn end(self) -> Vec<Op> {
        self.stop.store(true, Ordering::SeqCst);
        self.threads.into_iter().flat_map(|thread| thread.join().expect("the meter does not fail")).collect()
    }
}

fn as_ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// One lock and one release, as operations of a process of its own.
fn metered(client: &PgLockClient, key: &str, ops: &mut Vec<Op>) {
    let options = LockOptions::new().ttl(METER_TTL).timeout(METER_WAIT);
    let mut op = Op {
        process: METER,
        what: What::Acquire,
        key: key.to_owned(),
        fence: 0,
        ttl: as_ns(METER_TTL),
        send: now(),
        recv: 0,
        bound: as_ns(METER_WAIT),
        outcome: Outcome::Pending,
        stalled: 0,
        set: None,
        limit: 0,
        call: 0,
        order: None,
    };
    let locked = client.lock_with(key, &options);
    op.recv = now();
    let failed = |error: &LockError| {
        if error.is_outcome_unknown() {
            Outcome::Unknown(None)
        } else {
            Outcome::Failed(error.code().to_string())
        }
    };
    match locked {
        Ok(guard) => {
            let fence = guard.fence().get();
            op.outcome = Outcome::Ok { number: fence, decided_ms: 0 };
            let send = now();
            let released = guard.release();
            let outcome =
                released.map_or_else(|error| failed(&error), |_| Outcome::Ok { number: 0, decided_ms: 0 });
            // What a release may take is the operation timeout that is the default.
            let bound = as_ns(Duration::from_secs(5));
            let release = Op { what: What::Release, fence, send, recv: now(), bound, outcome, ..op.clone() };
            ops.extend([op, release]);
        }
        Err(error) => {
            op.outcome = failed(&error);
            ops.push(op);
        }
    }
}

/// The longest time without one of these that ends between two moments: its two ends.
fn longest_gap(times: &[u64], from: u64, to: u64) -> (u64, u64) {
    let pairs = times.windows(2).map(|pair| (pair[0], pair[1]));
    pairs
        .filter(|(_, end)| (from..=to).contains(end))
        .max_by_key(|(start, end)| end - start)
        .unwrap_or((from, to))
}

/// For how long nothing was granted in a failover: the cluster's own share, and what came on top.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    pub own: u64,
    pub beyond: u64,
}

/// The cluster is back with the first durable write after its longest time without one; whichever of these threads
/// is granted something last since then tells what came on top.
pub fn gap(writes: &[u64], grants: &BTreeMap<String, Vec<u64>>, from: u64, to: u64) -> Gap {
    let (lost, back) = longest_gap(writes, from, to);
    let first = |grants: &Vec<u64>| grants.iter().copied().find(|grant| *grant >= back).unwrap_or(to);
    Gap { own: back - lost, beyond: grants.values().map(first).max().unwrap_or(to) - back }
}

pub fn granted(op: &Op) -> bool {
    op.what == What::Acquire && matches!(op.outcome, Outcome::Ok { .. })
}

#[test]
fn the_gap_is_parted_at_the_first_write() {
    let ms = |times: &[u64]| times.iter().map(|time| time * MS).collect::<Vec<_>>();
    let writes = ms(&[100, 110, 500, 510, 900]);
    let found = |grants: &[&[u64]]| {
        let threads = grants.iter().enumerate().map(|(n, times)| (n.to_string(), ms(times)));
        gap(&writes, &threads.collect(), 120 * MS, 800 * MS)
    };
    assert_eq!(found(&[&[105, 520, 530]]), Gap { own: 390 * MS, beyond: 20 * MS });
    assert_eq!(
        found(&[&[105, 520], &[510, 790]]),
        Gap { own: 390 * MS, beyond: 20 * MS },
        "the last of them"
    );
    assert_eq!(found(&[&[105, 520], &[790]]), Gap { own: 390 * MS, beyond: 290 * MS }, "the last of them");
    assert_eq!(found(&[&[105]]), Gap { own: 390 * MS, beyond: 300 * MS }, "none until the end");
}

//! A fork without an exec, as of a server that loads everything and then makes its workers: the child
//! has the parent's connections, guards and threads' names, and must leave all of them alone.

use std::process::{Command, exit};
use std::time::{Duration, Instant};

use postgres::NoTls;
use rustix::process::{WaitOptions, nice, waitpid};
use syncguard::{
    AdvisoryGuard, AdvisoryKey, LockOptions, Lookup, PgLockClient, ReleaseResult, TelemetryOptions,
};

use crate::support::worker::{self, Parent};
use crate::support::{self, LIMIT, Worker, wait_until};

const TTL: Duration = Duration::from_secs(2);

/// Runs this in a child process, and waits for its end.
fn in_a_fork(parent: &Parent, what: &str, child: impl FnOnce() -> Result<(), String>) {
    // See fork.c: safe Rust has no fork.
    let pid = nice(1_234_567).expect("the preloaded library forks");
    if pid == 0 {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
        let line = outcome.map_or_else(|_| "panicked".to_owned(), |done| done.err().unwrap_or_default());
        parent.say(&format!("{what}: {line}"));
        exit(0);
    }
    let pid = rustix::process::Pid::from_raw(pid).expect("a child");
    let mut ended = None;
    wait_until(LIMIT, "the child ends", || {
        ended = waitpid(Some(pid), WaitOptions::NOHANG).expect("our child");
        ended.is_some()
    });
}

fn refused<T>(what: &str, result: syncguard::Result<T>) -> Result<(), String> {
    match result {
        Ok(_) => Err(format!("{what} worked")),
        Err(error) if error.to_string().contains("fork") && !error.is_outcome_unknown() => Ok(()),
        Err(error) => Err(format!("{what} said {error}")),
    }
}

/// All that a child may try with what it has got from its parent.
fn misuse(
    client: PgLockClient,
    guards: Vec<syncguard::LockGuard>,
    advisory: Option<AdvisoryGuard>,
    id: &str,
) -> Result<(), String> {
    let start = Instant::now();
    refused("acquire", client.acquire("child", TTL))?;
    refused("lock", client.lock("child"))?;
    refused("try_lock", client.try_lock("child"))?;
    refused("is_locked", client.is_locked("child"))?;
    refused("release", client.release(id))?;
    refused("extend", client.extend(id, TTL))?;
    refused("with_lock", client.with_lock("child", &LockOptions::new(), |_| ()))?;
    refused("lookup", client.lookup(Lookup::Key("child")))?;
    refused("owns", client.owns(id))?;
    refused("setup_schema", client.setup_schema())?;
    refused("counts", client.operator().counts())?;
    refused("break_lock", client.operator().break_lock("child", "a child"))?;
    refused("advisory_holders", client.advisory_holders())?;
    refused("try_advisory_lock", client.try_advisory_lock(&AdvisoryKey::from_text("child")))?;
    let mut guards = guards.into_iter();
    let (Some(first), Some(second), Some(third)) = (guards.next(), guards.next(), guards.next()) else {
        return Err("three guards are needed".into());
    };
    refused("guard.extend", first.extend(TTL))?;
    refused("guard.release", first.release())?;
    if second.is_held() || !second.remaining().is_zero() {
        return Err("the child takes itself for a holder".into());
    }
    drop(second);
    let _ = third.leak();
    if let Some(advisory) = advisory {
        if advisory.is_held() {
            return Err("the child takes itself for the holder of a session lock".into());
        }
        refused("advisory.release", advisory.release())?;
    }
    let _ = client.close(Duration::from_secs(1));
    drop(client);
    let took = start.elapsed();
    if took > Duration::from_secs(5) { Err(format!("it took {took:?}")) } else { Ok(()) }
}

fn forker(parent: &Parent) {
    let url = parent.arg("url");
    let options = LockOptions::new().ttl(TTL);
    // What runs beside a client at the fork: its threads, one that reports, one that listens for a waiter.
    let reported = PgLockClient::builder().telemetry(TelemetryOptions::new(|_| ()));
    let own = reported.connect(&url).expect("the server is there");
    let manager = r2d2_postgres::PostgresConnectionManager::new(url.parse().expect("a URL"), NoTls);
    let pool = r2d2::Pool::builder().max_size(6).build(manager).expect("the server is there");
    let callers = PgLockClient::builder().build(pool).expect("the server is there");
    for (what, client) in [("own pool", own), ("caller's pool", callers)] {
        let lock = |n: usize| client.lock_with(&format!("{what}:{n}"), &options).expect("free");
        let (child, kept) = ((0..3).map(lock).collect::<Vec<_>>(), lock(3));
        let key = |n: u8| AdvisoryKey::from_text(&format!("{what}:{n}"));
        let advisory = client.try_advisory_lock(&key(0)).expect("the server answers");
        let for_child = client.try_advisory_lock(&key(1)).expect("the server answers");
        let waiter = {
            let (client, key) = (client.clone(), format!("{what}:3"));
            std::thread::spawn(move || client.lock_with(&key, &LockOptions::new().timeout(LIMIT)).is_ok())
        };
        // Long enough that it is listened for it, where that is done.
        std::thread::sleep(Duration::from_millis(200));
        let before: Vec<_> = child.iter().map(syncguard::LockGuard::expires_at_ms).collect();
        let id = kept.lock_id().to_owned();
        // The child's copies, and the parent's own, which live on.
        let (copy, copies) = (client.clone(), child);
        let mut moved = Some((copy, copies, for_child));
        let start = Instant::now();
        in_a_fork(parent, what, || {
            let (client, guards, advisory) = moved.take().expect("here once");
            misuse(client, guards, advisory, &id)
        });
        let (copy, guards, second) = moved.take().expect("this is the parent");
        let renewed =
            || guards.iter().zip(&before).all(|(guard, before)| guard.expires_at_ms() > *before + 500);
        wait_until(LIMIT, "the parent's are renewed", || start.elapsed() > TTL * 3 / 2 && renewed());
        let held = guards.iter().chain([&kept]).all(syncguard::LockGuard::is_held);
        let session = [&advisory, &second].iter().all(|one| one.as_ref().is_some_and(AdvisoryGuard::is_held));
        let released: Vec<_> = guards.into_iter().chain([kept]).map(|guard| guard.release().ok()).collect();
        let all = released.iter().all(|one| *one == Some(ReleaseResult::Released));
        let waited = waiter.join().expect("no panic");
        parent.say(&format!("{what}, parent: {held} {session} {all} {waited}"));
        drop((copy, advisory, second));
    }
}

#[test]
fn a_child_leaves_its_parents_connections_and_leases_alone() {
    worker::part("forker", forker);
    let schema = support::schema();
    let dir = support::server().dir();
    let (source, library) = (dir.join("fork.c"), dir.join("fork.so"));
    std::fs::write(&source, include_str!("fork.c")).unwrap();
    let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
    assert!(made.unwrap().success());
    let mut forker = Worker::start_alone_with(
        "fork::a_child_leaves_its_parents_connections_and_leases_alone",
        "forker",
        &[("url", &schema.url())],
        &[("LD_PRELOAD", &library)],
    );
    for line in [
        "own pool: ",
        "own pool, parent: true true true true",
        "caller's pool: ",
        "caller's pool, parent: true true true true",
    ] {
        forker.expect(line);
    }
    assert!(forker.join().success());
}

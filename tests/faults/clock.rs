//! The server's clock is set, forwards and back, by hours, while leases are held.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use syncguard::{LockOptions, LostReason, PgLockClient};

use crate::fenced::{Damage, READ_KEPT, TABLES, WRITE_KEPT};
use crate::holder::Random;
use crate::support::{Config, LIMIT, Server, wait_until};

const HOUR: i64 = 3_600_000;

/// A server whose clock obeys, see `clock.c`.
struct Clockwork {
    // Before the directory: it is read until the server has ended.
    server: Server,
    dir: PathBuf,
}

impl Clockwork {
    fn start() -> Self {
        let dir = std::env::temp_dir().join(format!("syncguard-clock-{}", crate::support::unique()));
        fs::create_dir(&dir).expect("a temporary directory");
        let (library, file) = (dir.join("clock.so"), dir.join("added"));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/faults/clock.c");
        let output =
            Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(source).output();
        let output = output.expect("a C compiler is installed (cc)");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        fs::write(&file, "0").expect("the directory is ours");
        let config = Config::new()
            .env("LD_PRELOAD", &library.to_string_lossy())
            .env("SYNCGUARD_CLOCK", &file.to_string_lossy());
        Self { server: Server::start(&config), dir }
    }

    /// What the server's clock is ahead of the true one, from now on.
    fn set(&self, added_ms: i64) {
        let new = self.dir.join("new");
        fs::write(&new, added_ms.to_string()).expect("the directory is ours");
        fs::rename(new, self.dir.join("added")).expect("the directory is ours");
    }

    fn client(&self) -> PgLockClient {
        PgLockClient::connect(self.server.url()).expect("the server takes connections")
    }
}

impl Drop for Clockwork {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

#[test]
fn holders_are_told_when_the_servers_clock_is_set_forward_and_keep_their_locks_when_it_is_set_back() {
    let place = Clockwork::start();
    let (client, other) = (place.client(), place.client());
    let ahead = |sql: &mut postgres::Client| -> f64 {
        let clock = "SELECT extract(epoch FROM clock_timestamp())::float8";
        let theirs: f64 = sql.query_one(clock, &[]).expect("the server answers").get(0);
        theirs - std::time::SystemTime::UNIX_EPOCH.elapsed().expect("it is later than 1970").as_secs_f64()
    };
    let mut sql = place.server.client();
    for hours in [1, -1, 0] {
        place.set(hours * HOUR);
        let found = ahead(&mut sql);
        assert!(
            (found - 3600.0 * f64::from(i32::try_from(hours).unwrap_or(0))).abs() < 60.0,
            "{hours} h: {found} s"
        );
    }

    let options = LockOptions::new().ttl(Duration::from_secs(2));
    let old = client.lock_with("k", &options).expect("it is free");
    place.set(HOUR);
    let new = other
        .lock_with("k", &LockOptions::new().ttl(Duration::from_secs(2)).timeout(LIMIT))
        .expect("the lease is over");
    assert!(new.fence() > old.fence());
    wait_until(LIMIT, "the old holder is told", || old.lost().is_cancelled());
    let reason = old.lost_reason();
    assert!(
        matches!(reason, Some(LostReason::TakenOver { .. } | LostReason::Expired | LostReason::RowMissing)),
        "{reason:?}"
    );
    let mut transaction = sql.transaction().expect("the server answers");
    assert!(old.fence_transaction(&mut transaction).is_err(), "the late one is refused");
    drop(transaction);

    // Back: the lease now seems to last an hour; its holder renews it, and can let it go.
    place.set(0);
    let until = new.expires_at_ms();
    wait_until(LIMIT, "it is renewed by the clock as it is now", || {
        new.expires_at_ms() != until || !new.is_held()
    });
    assert!(new.is_held());
    assert!(client.try_lock("k").expect("the server answers").is_none());
    new.release().expect("it is held");
    let next = client.try_lock("k").expect("the server answers").expect("it was released");
    assert!(next.fence().get() > 2);
}

#[test]
fn fences_rise_and_no_write_is_lost_while_the_servers_clock_jumps() {
    let place = Clockwork::start();
    let mut sql = place.server.client();
    sql.batch_execute(TABLES).expect("the server takes tables");
    sql.batch_execute("INSERT INTO ledger (key) VALUES ('k0'), ('k1')").expect("rows");
    let stop = AtomicBool::new(false);
    let granted = thread::scope(|scope| {
        let work = |n: u64| {
            let (client, mut sql) = (place.client(), place.server.client());
            let stop = &stop;
            move || {
                let (mut random, mut fences) = (Random(n + 77), Vec::new());
                while !stop.load(Ordering::SeqCst) {
                    let key = format!("k{}", random.below(2));
                    let options =
                        LockOptions::new().ttl(Duration::from_millis(300)).timeout(Duration::from_secs(2));
                    let Ok(guard) = client.lock_with(&key, &options) else { continue };
                    let fence = i64::try_from(guard.fence().get()).expect("15 digits");
                    fences.push((key.clone(), fence));
                    if let Some(row) = sql.query_opt(READ_KEPT, &[&key, &fence]).expect("the server answers")
                    {
                        thread::sleep(Duration::from_millis(random.below(20)));
                        let next = row.get::<_, i64>(0) + 1;
                        let _ = sql.execute(WRITE_KEPT, &[&key, &fence, &next]).expect("the server answers");
                    }
                    let _ = guard.release();
                }
                fences
            }
        };
        let workers: Vec<_> = (0..4).map(|n| scope.spawn(work(n))).collect();
        let (mut random, end) = (Random(crate::seed() | 1), Instant::now() + Duration::from_secs(6));
        while Instant::now() < end {
            // Mostly little, around the ttl and the tolerance; now and then hours.
            let most = if random.below(4) == 0 { 4 * HOUR } else { 4000 };
            place.set(i64::try_from(random.below(most.unsigned_abs())).unwrap_or(0) - most / 2);
            thread::sleep(Duration::from_millis(50));
        }
        place.set(8 * HOUR);
        stop.store(true, Ordering::SeqCst);
        workers
            .into_iter()
            .flat_map(|worker| worker.join().expect("a worker does not fail"))
            .collect::<Vec<_>>()
    });
    let different: BTreeSet<_> = granted.iter().collect();
    assert_eq!(different.len(), granted.len(), "a fence was granted twice");
    assert!(granted.len() > 20, "{} grants", granted.len());
    let damage = Damage::of(&mut sql);
    println!("a clock that jumps: {} grants, {} writes", granted.len(), damage.written);
    assert_eq!((damage.lost, damage.stale), (0, 0));
    assert!(damage.written > 0);
}

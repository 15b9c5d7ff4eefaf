//! The disk is full: a small file system, mounted for the test; `keeper.sh` unmounts it, however the
//! test ends. Where nobody may mount anything, the tests say so and try nothing.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use syncguard::{
    AcquireResult, ErrorCode, ExtendResult, Heartbeat, LockOptions, PgLockClient, ReleaseResult,
};

use crate::support::account::Account;
use crate::support::{Config, LIMIT, Server, Stop, wait_until};

const TTL: Duration = Duration::from_secs(30);

/// A small disk of a server.
struct Disk {
    dir: PathBuf,
    account: Account,
}

impl Disk {
    fn mount(server: &Server, megabytes: u32) -> Option<Self> {
        let (dir, account) = (server.dir().join("small"), Account::find().expect("there is one"));
        assert!(account.command("mkdir").arg(&dir).status().expect("mkdir").success());
        let mode = account.owner().unwrap_or_default();
        let owner =
            mode.split_once(':').map_or_else(String::new, |(uid, gid)| format!(",uid={uid},gid={gid}"));
        let options = format!("size={megabytes}m,mode=0777{owner}");
        let mount = |program: &[&str]| {
            let (first, rest) = program.split_first()?;
            let mut command = Command::new(first);
            command.args(rest).args(["-t", "tmpfs", "-o", &options, "syncguard-test"]).arg(&dir);
            command.output().ok().filter(|output| output.status.success())
        };
        if mount(&["mount"]).or_else(|| mount(&["sudo", "-n", "mount"])).is_none() {
            println!("NOT TRIED: a full disk; nothing can be mounted here without being root");
            return None;
        }
        Some(Self { dir, account })
    }

    /// Nothing is left.
    fn fill(&self) {
        let mut dd = self.account.command("dd");
        dd.args(["if=/dev/zero", "bs=4096"]).arg(format!("of={}", self.dir.join("filler").display()));
        let output = dd.output().expect("dd");
        assert!(!output.status.success(), "the file system has an end");
    }

    fn free(&self) {
        std::fs::remove_file(self.dir.join("filler")).expect("it is there");
    }
}

/// Keys that fill pages fast.
fn long_key(n: usize) -> String {
    format!("{n}:{}", "x".repeat(400))
}

#[test]
fn a_full_disk_under_the_tables_refuses_and_changes_nothing() {
    let server = Server::start(&Config::new());
    let Some(disk) = Disk::mount(&server, 32) else { return };
    let mut sql = server.client();
    sql.batch_execute(&format!("CREATE TABLESPACE small LOCATION '{}'", disk.dir.display())).unwrap();
    sql.batch_execute("CREATE DATABASE small TABLESPACE small").unwrap();
    let url = format!("{}small", server.url().strip_suffix("postgres").unwrap());
    let client = PgLockClient::connect(&url).unwrap();
    let options = LockOptions::new().ttl(TTL).heartbeat(Heartbeat::Off);
    let guard = client.lock_with("held", &options).unwrap();
    disk.fill();
    let mut n = 0;
    let error = loop {
        match client.acquire(&long_key(n), TTL) {
            Ok(granted) => assert!(matches!(granted, AcquireResult::Acquired(_))),
            Err(error) => break error,
        }
        n += 1;
        assert!(n < 10_000, "the disk never is full");
    };
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error}");
    assert!(!error.is_outcome_unknown(), "{error}");
    let mut small = postgres::Client::connect(&url, postgres::NoTls).unwrap();
    let mut count = |sql: &str| small.query_one(sql, &[]).unwrap().get::<_, i64>(0);
    let rows = i64::try_from(n).unwrap() + 1;
    assert_eq!(count("SELECT count(*) FROM syncguard_locks"), rows, "the refused one is not there");
    assert_eq!(count("SELECT sum(fence)::int8 FROM syncguard_fence_counters"), rows, "no fence was burnt");

    let before = guard.remaining();
    match guard.extend(2 * TTL) {
        Ok(ExtendResult::Extended { .. }) => {}
        Ok(ExtendResult::NotHeld) => panic!("it is held"),
        Err(error) => {
            assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error}");
            assert!(guard.remaining() <= before, "the old deadline stays");
        }
    }
    assert!(guard.is_held());
    assert_eq!(guard.release().unwrap(), ReleaseResult::Released, "to delete takes no room");
    disk.free();
    let granted = client.acquire(&long_key(n), TTL).unwrap().acquired().expect("it is free");
    assert_eq!(granted.fence.get(), 1);
}

#[test]
fn a_full_disk_under_the_log_brings_the_server_down_and_repeats_no_fence() {
    let server = Server::start(&Config::new());
    let Some(disk) = Disk::mount(&server, 48) else { return };
    let client = PgLockClient::connect(server.url()).unwrap();
    server.stop(Stop::Fast);
    let (wal, there) = (server.data_dir().join("pg_wal"), disk.dir.join("pg_wal"));
    assert!(disk.account.command("mv").args([&wal, &there]).status().unwrap().success());
    assert!(disk.account.command("ln").arg("-s").args([&there, &wal]).status().unwrap().success());
    server.start_again();
    disk.fill();
    let burn = std::thread::spawn({
        let mut sql = server.client();
        // Writes until the segment is full; there is no room for another one.
        move || {
            while sql.execute("SELECT pg_logical_emit_message(true, '', repeat('x', 100000))", &[]).is_ok() {}
        }
    });
    let mut last = 0;
    let mut failures = 0;
    wait_until(LIMIT, "the server has gone", || {
        match client.acquire("k", TTL) {
            Ok(AcquireResult::Acquired(granted)) => {
                assert!(granted.fence.get() > last);
                last = granted.fence.get();
                let _ = client.release(&granted.lock_id);
            }
            // A release that was not heard.
            Ok(AcquireResult::Locked) => {}
            Err(error) => {
                assert!(
                    matches!(error.code(), ErrorCode::ServiceUnavailable | ErrorCode::NetworkTimeout),
                    "{error}"
                );
                failures += 1;
            }
        }
        failures > 2
    });
    burn.join().unwrap();
    assert!(last > 0 && server.log().contains("No space left on device"), "{}", server.log());
    disk.free();
    server.stop(Stop::Kill);
    server.start_again();
    client.operator().break_lock("k", "its holder's release may be lost").unwrap();
    let next = client.acquire("k", TTL).unwrap().acquired().expect("it is free");
    assert!(next.fence.get() > last, "{} after {last}", next.fence);
}

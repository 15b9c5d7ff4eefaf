//! Busy keys, waits and their interruption, readers, permits, `--min-hold`.

use std::fs;
use std::time::Duration;

use syncguard::{LockOptions, PgLockClient};

use crate::Done;
use crate::program::{Dir, Process, rows, running, said, started, syncguard};
use crate::support::{self, LIMIT, wait_until};

#[test]
fn a_busy_key_has_a_code_of_its_own() -> Done {
    let schema = support::schema();
    let client = PgLockClient::connect(&schema.url())?;
    let guard = client.lock("key")?;
    for (options, code) in [
        (&["--wait", "0"][..], 75),
        (&["--wait", "0s"], 75),
        (&["--wait", "3s"], 75),
        (&["--wait", "0", "--busy-code", "9"], 9),
    ] {
        let args = [&["run", "--key", "key"][..], options, &["--", "true"]].concat();
        let (found, out, err) = said(&schema, &args);
        assert_eq!((found, out.as_str()), (code, ""), "{options:?} {err}");
        assert!(
            err.contains("key is held by somebody else for ") && err.contains(", under fencing token 1"),
            "{err}"
        );
        assert!(
            !err.contains('\r') && !err.contains("waiting"),
            "no progress where there is no terminal: {err}"
        );
    }
    guard.release()?;
    assert_eq!(said(&schema, &["run", "--key", "key", "--wait", "0", "--", "true"]).0, 0);
    Ok(())
}

#[test]
fn a_wait_ends_with_the_holders_release() -> Done {
    let (schema, dir) = (support::schema(), Dir::new());
    let script = "touch ready; while [ ! -e end ]; do sleep 0.02; done";
    let mut first = running(&schema, &dir, &[], script);
    let other = Dir::new();
    let mut second = started(&schema, &other, &["--wait", "1m"], "echo $SYNCGUARD_FENCE >fence; touch ready");
    wait_until_it_waits(&schema);
    assert!(!other.path("ready").exists());
    fs::write(dir.path("end"), "")?;
    assert_eq!(first.end().code(), Some(0));
    assert_eq!(second.end().code(), Some(0));
    assert_eq!(other.read("fence"), "000000000000002\n");
    Ok(())
}

#[test]
fn programs_that_share_a_key_run_together_and_nobody_else_beside_them() -> Done {
    let (schema, dir, other) = (support::schema(), Dir::new(), Dir::new());
    let script = "echo $SYNCGUARD_FENCE >fence; touch ready; while [ ! -e end ]; do sleep 0.02; done";
    let mut one = running(&schema, &dir, &["--shared"], script);
    let mut two = running(&schema, &other, &["--shared", "--wait", "0"], script);
    assert_eq!(dir.read("fence"), other.read("fence"));
    let (code, _, err) = said(&schema, &["run", "--key", "key", "--wait", "0", "--", "true"]);
    assert_eq!(code, 75, "{err}");
    let (_, out, _) = said(&schema, &["status", "key"]);
    assert!(out.starts_with("key (2 readers) is held for "), "{out}");
    let (_, out, _) = said(&schema, &["--json", "status", "key"]);
    assert!(out.contains("\"readers\":2") && out.contains("\"shared\":true"), "{out}");
    fs::write(dir.path("end"), "")?;
    assert_eq!(one.end().code(), Some(0));
    let (_, out, _) = said(&schema, &["list"]);
    assert!(out.contains("key (1 reader)"), "{out}");
    fs::write(other.path("end"), "")?;
    assert_eq!(two.end().code(), Some(0));
    let writer = PgLockClient::connect(&schema.url())?.lock("key")?;
    assert_eq!(said(&schema, &["run", "--key", "key", "--shared", "--wait", "0", "--", "true"]).0, 75);
    assert_eq!(said(&schema, &["run", "--key", "key", "--shared", "--permits", "2", "--", "true"]).0, 64);
    drop(writer);
    Ok(())
}

/// Until some waiter listens for a release.
fn wait_until_it_waits(schema: &support::TestSchema) {
    let mut client = schema.client();
    let sql = "SELECT EXISTS (SELECT FROM pg_locks l, (SELECT hashtext('key') AS number) k \
               WHERE l.locktype = 'advisory' AND l.classid = x'7367776B'::int::oid AND l.objid = k.number::oid)";
    wait_until(LIMIT, "somebody waits for the key", || client.query_one(sql, &[]).unwrap().get(0));
}

#[test]
fn signals_end_the_wait() -> Done {
    for (name, code) in [("TERM", 143), ("INT", 130), ("HUP", 129), ("QUIT", 131)] {
        let schema = support::schema();
        let client = PgLockClient::connect(&schema.url())?;
        let guard = client.lock("key")?;
        for options in [&[][..], &["--once", "daily"]] {
            let dir = Dir::new();
            let mut waiting = started(&schema, &dir, options, "touch ready");
            // It has asked at least once: `run` listens for the release, `run --once` looks.
            let pid = waiting.id();
            wait_until(LIMIT, "it is connected and waits", || sleeps_after_connecting(pid));
            waiting.signal(name);
            assert_eq!(waiting.end().code(), Some(code), "{options:?} {}", dir.read("log"));
            assert!(!dir.path("ready").exists(), "the program was not started");
        }
        assert!(guard.is_held());
        guard.release()?;
        assert_eq!(rows(&schema), 0, "nothing is left of the wait");
    }
    Ok(())
}

/// Whether it has a connection, so that it has come at least as far as asking.
fn sleeps_after_connecting(pid: u32) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let links = files.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("socket:")).count() >= 3
}

#[test]
fn a_server_that_is_away_is_told_apart_from_a_busy_key() {
    let schema = support::schema();
    let (code, _, err) =
        said(&schema, &["run", "--url", "postgresql://x@127.0.0.1:1/x", "--key", "key", "--", "true"]);
    assert!(code == 69 && err.contains("does the server run"), "{code} {err}");
    let mut nowhere = crate::program::bare();
    let (code, _, err) =
        crate::program::told(&nowhere.args(["run", "--key", "key", "--", "true"]).output().expect("it runs"));
    assert!(code == 64 && err.contains("which PostgreSQL?"), "{code} {err}");
}

#[test]
fn a_key_stays_taken_for_min_hold_and_no_longer_although_all_have_ended() -> Done {
    for (ttl, kept_ms) in [("5s", 300_000), ("1h", 300_000)] {
        let schema = support::schema();
        let args = ["run", "--key", "key", "--ttl", ttl, "--min-hold", "5m", "--", "true"];
        assert_eq!(said(&schema, &args).0, 0);
        let sql = "SELECT expires_at_ms - acquired_at_ms FROM syncguard_locks";
        let kept: i64 = schema.client().query_one(sql, &[])?.get(0);
        // The lease counts as live for a second after its end.
        assert!((kept_ms - 1_500..=kept_ms + 5_000).contains(&kept), "{ttl}: {kept}");
        assert_eq!(said(&schema, &["run", "--key", "key", "--wait", "0", "--", "true"]).0, 75);
    }
    Ok(())
}

#[test]
fn so_many_programs_run_as_there_are_permits() -> Done {
    let (schema, dirs) = (support::schema(), [Dir::new(), Dir::new()]);
    let script = "echo $SYNCGUARD_PERMIT >permit; touch ready; while [ ! -e end ]; do sleep 0.02; done";
    let mut commands: Vec<Process> =
        dirs.iter().map(|dir| running(&schema, dir, &["--permits", "2"], script)).collect();
    let mut permits: Vec<String> = dirs.iter().map(|dir| dir.read("permit")).collect();
    permits.sort();
    assert_eq!(permits, ["1\n", "2\n"]);
    let (code, _, err) =
        said(&schema, &["run", "--key", "key", "--permits", "2", "--wait", "0", "--", "true"]);
    assert!(code == 75 && err.contains("all 2 permits are held"), "{code} {err}");
    let (code, out, _) = said(&schema, &["status", "key"]);
    assert!(code == 1 && out.contains("2 permits"), "{code} {out}");
    let (_, out, _) = said(&schema, &["list"]);
    assert!(out.contains("key (permit 1)") && out.contains("key (permit 2)"), "{out}");
    for (dir, command) in dirs.iter().zip(&mut commands) {
        fs::write(dir.path("end"), "")?;
        assert_eq!(command.end().code(), Some(0));
    }
    assert_eq!(rows(&schema), 0);
    Ok(())
}

#[test]
fn the_command_and_the_library_share_a_lock() -> Done {
    let (schema, dir) = (support::schema(), Dir::new());
    let mut command = running(&schema, &dir, &[], "touch ready; while [ ! -e end ]; do sleep 0.02; done");
    let client = PgLockClient::connect(&schema.url())?;
    assert!(client.try_lock("key")?.is_none());
    fs::write(dir.path("end"), "")?;
    assert_eq!(command.end().code(), Some(0));
    let patient = LockOptions::new().timeout(Duration::from_secs(60));
    let guard = client.lock_with("key", &patient)?;
    assert_eq!(guard.fence().get(), 2);
    let mut busy = syncguard(&schema, &["run", "--key", "key", "--wait", "0", "--", "true"]);
    assert_eq!(busy.output()?.status.code(), Some(75));
    Ok(())
}

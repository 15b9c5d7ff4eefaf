//! The rule of liveness at its edge, to the millisecond, on PostgreSQL: with a server whose clock stands
//! still where the test puts it.
//!
//! Functions of the server belong to a database. The one that reads the clock is renamed there, and
//! another takes its name, which reads a table.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::time::Duration;

use crate::support::calls::{FORMS, token};
use crate::support::{Call, Config, Place, Server, TTL, id, unique};
use syncguard::backend::{Clock, ExtendOutcome, ReleaseOutcome, RenewOutcome, Renewal};
use syncguard::{AcquireResult, ErrorCode, LockBackend, Lookup, LostReason, Reason, TIME_TOLERANCE_MS};

/// A whole millisecond of the year 2026.
const NOW_MS: i64 = 1_767_225_600_000;

/// A place on a server whose clock shows [`NOW_MS`] and so many microseconds.
fn stopped(server: &Server, micros: i64) -> Place {
    let mut admin = server.client();
    admin
        .batch_execute(
            "CREATE TABLE public.stopped (at timestamptz NOT NULL); \
             INSERT INTO public.stopped VALUES (now()); \
             ALTER FUNCTION pg_catalog.clock_timestamp() RENAME TO clock_that_runs; \
             CREATE FUNCTION pg_catalog.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE \
               AS 'SELECT at FROM public.stopped'",
        )
        .unwrap();
    let sql = format!(
        "UPDATE public.stopped SET at = to_timestamp({}) + interval '{micros} microseconds'",
        NOW_MS / 1000
    );
    admin.batch_execute(&sql).unwrap();
    let place = Place::new(server.schema());
    assert_eq!(place.stored.now_ms(), NOW_MS + micros / 1000, "the server's clock stands there");
    place
}

/// Writes a row that expires at this time, whatever the time is.
fn expiring(place: &Place, key: &str, at_ms: i64) -> String {
    let lock_id = id(key);
    place.stored.write(key, &lock_id, at_ms - place.stored.now_ms(), 7);
    assert_eq!(place.stored.row(key).unwrap().expires_at_ms, at_ms);
    lock_id
}

#[test]
fn every_operation_judges_to_the_millisecond_with_the_time_rounded_down() {
    let server = Server::start(&Config::new());
    // Rounded down it is the next millisecond; rounded to the nearest it would be the one after.
    let place = stopped(&server, 1_999);
    let now = NOW_MS + 1;
    let client = &place.client;
    for two in FORMS {
        for (expires, live) in [(now - TIME_TOLERANCE_MS + 1, true), (now - TIME_TOLERANCE_MS, false)] {
            let what = format!("{} ms ago, token: {two}", now - expires);
            let token = || token(two);
            let key = "k";
            let again = || {
                place.stored.run("DELETE FROM syncguard_locks");
                expiring(&place, key, expires)
            };

            let lock_id = again();
            assert_eq!(LockBackend::is_locked(client, key, &token()).unwrap(), live, "{what}");
            for lookup in [Lookup::Key(key), Lookup::LockId(&lock_id)] {
                assert_eq!(LockBackend::lookup(client, lookup, &token()).unwrap().is_some(), live, "{what}");
            }
            assert_eq!(client.operator().holders(10).unwrap().len(), usize::from(live), "{what}");
            assert_eq!(client.operator().counts().unwrap().live, u64::from(live), "{what}");

            let mut own = place.schema.client();
            let mut transaction = own.transaction().unwrap();
            let fence = "000000000000007".parse().unwrap();
            let asserted = client.assert_fence(&mut transaction, key, fence).map_err(|error| error.code());
            assert_eq!(asserted, if live { Ok(()) } else { Err(ErrorCode::Aborted) }, "{what}");
            drop(transaction);

            let extended = LockBackend::extend(client, &lock_id, TTL, &token()).unwrap();
            let expected = if live {
                ExtendOutcome::Extended { expires_at_ms: now + 30_000 }
            } else {
                ExtendOutcome::NotHeld(Some(Reason::Expired))
            };
            assert_eq!(extended, expected, "{what}");

            let lock_id = again();
            let renewal = Renewal::new(key, &lock_id, syncguard::Fence::new(7).unwrap(), TTL);
            let deadline = Clock::system().now().after(Duration::from_secs(60));
            let renewed = client.renew(&[renewal], deadline).remove(0).unwrap();
            let expected = if live {
                RenewOutcome::Renewed { expires_at_ms: now + 30_000, version: None }
            } else {
                RenewOutcome::Lost(LostReason::Expired)
            };
            let renewed = match renewed {
                RenewOutcome::Renewed { expires_at_ms, .. } => {
                    RenewOutcome::Renewed { expires_at_ms, version: None }
                }
                other => other,
            };
            assert_eq!(renewed, expected, "{what}");

            again();
            let acquired = LockBackend::acquire(client, key, TTL, &token()).unwrap();
            assert_eq!(acquired == AcquireResult::Locked, live, "{what}");
            if let Some(grant) = acquired.acquired() {
                let row = place.stored.row(key).unwrap();
                assert_eq!((row.acquired_at_ms, grant.expires_at_ms), (now, now + 30_000), "{what}");
            }

            let lock_id = again();
            let released = LockBackend::release(client, &lock_id, &token()).unwrap();
            let expected =
                if live { ReleaseOutcome::Released } else { ReleaseOutcome::NotHeld(Some(Reason::Expired)) };
            assert_eq!(released, expected, "{what}");
            assert_eq!(place.stored.row(key).is_none(), live, "{what}");
        }
        // Where no row stood before.
        place.stored.run("DELETE FROM syncguard_locks");
        let grant = LockBackend::acquire(client, "new", TTL, &token(two)).unwrap().acquired().unwrap();
        let row = place.stored.row("new").unwrap();
        assert_eq!((row.acquired_at_ms, grant.expires_at_ms), (now, now + 30_000));
    }

    // Cleanup has a guard of its own.
    place.stored.run("DELETE FROM syncguard_locks");
    for (key, expires) in [("stays", now - 2_000), ("goes", now - 2_001)] {
        expiring(&place, key, expires);
    }
    assert_eq!(client.operator().cleanup_expired(10).unwrap(), 1);
    assert!(place.stored.row("stays").is_some() && place.stored.row("goes").is_none());
}

/// A contender that has waited judges what it finds then, by the same rule: behind the key's queue
/// somebody has written a row where none was, behind a row's lock somebody has moved its end.
#[test]
fn what_changed_during_a_wait_is_judged_to_the_millisecond_too() {
    let server = Server::start(&Config::new());
    let place = stopped(&server, 0);
    for (expires, live) in [(NOW_MS - TIME_TOLERANCE_MS + 1, true), (NOW_MS - TIME_TOLERANCE_MS, false)] {
        for (two, in_queue) in [(false, false), (false, true), (true, false), (true, true)] {
            place.stored.run("DELETE FROM syncguard_locks");
            let mut other = place.schema.client();
            let block = if in_queue {
                "SELECT pg_advisory_xact_lock(hashtext('k'))"
            } else {
                expiring(&place, "k", NOW_MS - 5_000);
                "SELECT FROM syncguard_locks FOR UPDATE"
            };
            other.batch_execute(&format!("BEGIN; {block}")).unwrap();
            let name = unique();
            let client = place.named(&name);
            let call = Call::start(&name, move || LockBackend::acquire(&client, "k", TTL, &token(two)));
            call.wait_until_blocked(&place.stored);
            let write = format!(
                "INSERT INTO syncguard_locks VALUES ('k', '{}', {expires}, {expires} - 1000, '000000000000007', 'k') \
                 ON CONFLICT (key) DO UPDATE SET expires_at_ms = EXCLUDED.expires_at_ms; COMMIT",
                id("other")
            );
            other.batch_execute(&write).unwrap();
            let refused = call.join().unwrap() == AcquireResult::Locked;
            assert_eq!(refused, live, "{} ms ago, token: {two}, queue: {in_queue}", NOW_MS - expires);
        }
    }
}

//! `status`, `list`, `waiters`: who holds what, and who waits.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use syncguard::backend::{HeldBy, LockBackend as _, Moment};
use syncguard::{CancelToken, LockInfoRaw, Lookup, PgLockClient, Result as Asked, Waiter, hash_key};

use crate::args::{At, List, Status, Waiters};
use crate::connection::look;
use crate::failure::{Ended, say};
use crate::output::{Held, age, clock, print, print_json, printable, table};

/// The key is free.
const FREE: u8 = 1;

/// The live lease of this key, with the server's time.
pub(crate) fn find(client: &PgLockClient, key: &str) -> Asked<Option<Held>> {
    let Some(HeldBy { mut lease, .. }) = client.who_holds(key, Moment::NEVER, &CancelToken::never())? else {
        return Ok(None);
    };
    let now_ms = client.operator().server_time_ms()?;
    // That says who holds the key, but not how many readers share it: a lookup counts them.
    if lease.shared {
        lease.readers = client.lookup(Lookup::Key(key))?.and_then(|found| found.readers);
    }
    Ok(Some(Held { key: key.to_owned(), lease, now_ms }))
}

/// All live leases, by name.
pub(crate) fn all(client: &PgLockClient, limit: u32) -> Asked<Vec<Held>> {
    let operator = client.operator();
    let leases = operator.holders_raw(limit)?;
    let now_ms = operator.server_time_ms()?;
    let shown = |raw: LockInfoRaw| Held { lease: raw.sanitized(), key: raw.key, now_ms };
    let mut held: Vec<Held> = leases.into_iter().map(shown).collect();
    held.sort_by(|a, b| (&a.key, a.lease.permit).cmp(&(&b.key, b.lease.permit)));
    Ok(held)
}

pub(crate) fn status(at: &At, status: &Status) -> Ended {
    let client = look(at)?;
    if let Some(held) = find(&client, &status.key)? {
        if at.json {
            print_json(&held.json())?;
        } else {
            print(&format!(
                "{} is held{} for {}, since {}, under fencing token {}; its lease ends in {} unless it is renewed",
                held.name(),
                held.by().unwrap_or_default(),
                age(held.age()),
                clock(held.lease.acquired_at_ms),
                held.lease.fence.get(),
                age(held.remaining())
            ))?;
        }
        return Ok(0);
    }
    let permits = client.semaphore(&status.key, 1)?.in_use()?;
    if at.json {
        print_json(&json!({ "key": status.key, "held": false, "permits_in_use": permits }))?;
    } else {
        let name = printable(&status.key);
        match permits {
            0 => print(&format!("{name} is free"))?,
            n => print(&format!(
                "{name} is free as a lock; {n} permits of the semaphore of this name are held"
            ))?,
        }
    }
    Ok(FREE)
}

pub(crate) fn list(at: &At, list: &List) -> Ended {
    let held = all(&look(at)?, list.limit)?;
    if at.json {
        print_json(&Value::Array(held.iter().map(Held::json).collect()))?;
    } else if held.is_empty() {
        print("nothing is held")?;
    } else {
        let row = |held: &Held| {
            vec![
                held.name(),
                held.lease.fence.get().to_string(),
                age(held.age()),
                clock(held.lease.acquired_at_ms),
                age(held.remaining()),
                held.lease.who().unwrap_or_default(),
            ]
        };
        // Where nobody says anything there is no column for it.
        let said = held.iter().any(|held| held.lease.who().is_some());
        let headings = ["KEY", "FENCE", "HELD FOR", "SINCE", "ENDS IN", "WHO"];
        let headings = headings.get(..headings.len() - usize::from(!said)).unwrap_or_default();
        table(headings, &held.iter().map(row).collect::<Vec<_>>())?;
    }
    if u32::try_from(held.len()).is_ok_and(|shown| shown == list.limit) {
        say(&format!("there may be more than these {}: see --limit", list.limit));
    }
    Ok(0)
}

pub(crate) fn waiters(at: &At, waiters: &Waiters) -> Ended {
    let client = look(at)?;
    match &waiters.key {
        _ if waiters.fair => in_order(at, &client),
        Some(key) => stuck(at, &client, key),
        None => waiting(at, &client),
    }
}

/// Who has a ticket. Keys that nobody holds are known by their hashes only.
fn in_order(at: &At, client: &PgLockClient) -> Ended {
    let operator = client.operator();
    let (waiters, now_ms) = (operator.waiters(u32::MAX)?, operator.server_time_ms()?);
    let keys: BTreeMap<String, String> =
        all(client, u32::MAX)?.into_iter().map(|lease| (hash_key(&lease.key), lease.key)).collect();
    if at.json {
        let objects = waiters.iter().map(|waiter| {
            json!({
                "key": keys.get(&waiter.key_hash),
                "key_hash": waiter.key_hash,
                "since_ms": waiter.since_ms,
                "now_ms": now_ms,
                "priority": waiter.priority,
                "note": waiter.note,
            })
        });
        print_json(&Value::Array(objects.collect()))?;
    } else if waiters.is_empty() {
        print("nobody waits in order")?;
    } else {
        let row = |waiter: &Waiter| {
            let waited = u64::try_from(now_ms - waiter.since_ms).unwrap_or(0);
            vec![
                keys.get(&waiter.key_hash)
                    .map_or_else(|| format!("#{}", waiter.key_hash), |key| printable(key)),
                age(Duration::from_millis(waited)),
                waiter.priority.to_string(),
                waiter.note.as_deref().map(printable).unwrap_or_default(),
            ]
        };
        let rows: Vec<_> = waiters.iter().map(row).collect();
        table(&["KEY", "WAITS FOR", "PRIORITY", "NOTE"], &rows)?;
    }
    Ok(0)
}

/// How many clients wait for each key.
fn waiting(at: &At, client: &PgLockClient) -> Ended {
    let counts = client.operator().waiting()?;
    let mut keys: Vec<String> = all(client, u32::MAX)?.into_iter().map(|lease| lease.key).collect();
    keys.dedup();
    let waited_for: Vec<(String, u64)> =
        keys.into_iter().filter_map(|key| counts.get(&hash_key(&key)).map(|&count| (key, count))).collect();
    if at.json {
        let objects = waited_for.iter().map(|(key, count)| json!({ "key": key, "clients": count }));
        print_json(&Value::Array(objects.collect()))?;
    } else if waited_for.is_empty() {
        print("nobody waits")?;
    } else {
        let rows: Vec<_> =
            waited_for.iter().map(|(key, count)| vec![printable(key), count.to_string()]).collect();
        table(&["KEY", "CLIENTS THAT WAIT"], &rows)?;
    }
    Ok(0)
}

/// Which sessions are in the server over this key, and behind whom.
fn stuck(at: &At, client: &PgLockClient, key: &str) -> Ended {
    let found = client.operator().blocked(key)?;
    if at.json {
        let objects = found.iter().map(|waiter| {
            json!({
                "key": key,
                "pid": waiter.pid,
                "application_name": waiter.application_name,
                "waiting_ms": waiter.waiting_ms,
                "blocked_by": waiter.blocked_by,
            })
        });
        print_json(&Value::Array(objects.collect()))?;
    } else if found.is_empty() {
        print(
            "no session is stuck on it in the server; `syncguard waiters` shows who waits for its release",
        )?;
    } else {
        let row = |waiter: &syncguard::BlockedSession| {
            let blocked_by: Vec<String> = waiter.blocked_by.iter().map(ToString::to_string).collect();
            vec![
                waiter.pid.to_string(),
                printable(&waiter.application_name),
                age(Duration::from_millis(u64::try_from(waiter.waiting_ms).unwrap_or(0))),
                blocked_by.join(", "),
            ]
        };
        let rows: Vec<_> = found.iter().map(row).collect();
        table(&["PID", "APPLICATION", "WAITS FOR", "BLOCKED BY"], &rows)?;
    }
    Ok(0)
}

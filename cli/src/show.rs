//! `status`, `list`, `waiters`: who holds what, and who waits.

use std::time::Duration;

use serde_json::{Value, json};
use syncguard::{LockInfoRaw, PgLockClient, Result as Asked, hash_key};

use crate::args::{At, List, Status, Waiters};
use crate::connection::look;
use crate::failure::{Ended, say};
use crate::output::{Held, age, clock, print, print_json, printable, table};

/// The key is free.
const FREE: u8 = 1;

/// The live lease of this key, with the server's time.
pub(crate) fn find(client: &PgLockClient, key: &str) -> Asked<Option<Held>> {
    let Some(lease) = client.get_by_key(key)? else { return Ok(None) };
    let now_ms = client.operator().server_time_ms()?;
    Ok(Some(Held {
        key: key.to_owned(),
        permit: None,
        fence: lease.fence,
        acquired_at_ms: lease.acquired_at_ms,
        expires_at_ms: lease.expires_at_ms,
        now_ms,
    }))
}

/// All live leases, by name.
pub(crate) fn all(client: &PgLockClient, limit: u32) -> Asked<Vec<Held>> {
    let operator = client.operator();
    let leases = operator.holders_raw(limit)?;
    let now_ms = operator.server_time_ms()?;
    let mut held: Vec<Held> = leases.into_iter().map(|lease| shown(lease, now_ms)).collect();
    held.sort_by(|a, b| (&a.key, a.permit).cmp(&(&b.key, b.permit)));
    Ok(held)
}

fn shown(lease: LockInfoRaw, now_ms: i64) -> Held {
    Held {
        key: lease.key,
        permit: lease.permit,
        fence: lease.fence,
        acquired_at_ms: lease.acquired_at_ms,
        expires_at_ms: lease.expires_at_ms,
        now_ms,
    }
}

pub(crate) fn status(at: &At, status: &Status) -> Ended {
    let client = look(at)?;
    if let Some(lease) = find(&client, &status.key)? {
        if at.json {
            print_json(&lease.json())?;
        } else {
            print(&format!(
                "{} is held for {}, since {}, under fence {}; its lease ends in {} unless it is renewed",
                lease.name(),
                age(lease.age()),
                clock(lease.acquired_at_ms),
                lease.fence.get(),
                age(lease.remaining())
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
        let row = |lease: &Held| {
            vec![
                lease.name(),
                lease.fence.get().to_string(),
                age(lease.age()),
                clock(lease.acquired_at_ms),
                age(lease.remaining()),
            ]
        };
        table(&["KEY", "FENCE", "HELD FOR", "SINCE", "ENDS IN"], &held.iter().map(row).collect::<Vec<_>>())?;
    }
    if u32::try_from(held.len()).is_ok_and(|shown| shown == list.limit) {
        say(&format!("there may be more than these {}: see --limit", list.limit));
    }
    Ok(0)
}

pub(crate) fn waiters(at: &At, waiters: &Waiters) -> Ended {
    let client = look(at)?;
    match &waiters.key {
        Some(key) => stuck(at, &client, key),
        None => waiting(at, &client),
    }
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
    let found = client.operator().waiters(key)?;
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
            "no session is stuck over it in the server; who waits for its release is in `syncguard waiters`",
        )?;
    } else {
        let row = |waiter: &syncguard::Waiter| {
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

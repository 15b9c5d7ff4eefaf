//! `break`, `cleanup`, `setup`.

use serde_json::json;
use syncguard::Result as Asked;

use crate::args::{At, Break, Cleanup};
use crate::connection::{connect, look};
use crate::failure::{BUSY, Ended, say};
use crate::output::{print, print_json, printable};

/// Takes the lease with this fence away, and no newer one.
pub(crate) fn break_lock(at: &At, request: &Break) -> Ended {
    let operator = look(at)?.operator();
    // What the library warns of is what this command says by itself.
    log::set_max_level(log::LevelFilter::Error);
    let who = "syncguard break";
    let name = printable(&request.key);
    let broken = match request.permit {
        None => operator.break_lock_under(&request.key, request.fence, who)?,
        Some(number) => {
            let seen = operator.holders_raw(u32::MAX)?.into_iter().find(|lease| {
                (lease.key.as_str(), lease.permit, lease.fence)
                    == (&*request.key, Some(number), request.fence)
            });
            match seen {
                None => None,
                Some(lease) => operator.break_lease(&lease.lock_id, who)?,
            }
        }
    };
    let Some(broken) = broken else {
        say(&format!(
            "nothing was broken: {name} is not held under fencing token {}; see `syncguard status` for who has it now",
            request.fence.get()
        ));
        return Ok(BUSY);
    };
    if at.json {
        print_json(
            &json!({ "key": request.key, "broken": request.fence.to_string(), "fence": broken.fence.to_string() }),
        )?;
    } else {
        print(&format!(
            "{name} is free: the lease under fencing token {} was taken away, and the fencing token is {} now.",
            request.fence.get(),
            broken.fence.get()
        ))?;
        print("Its holder notices at its next renewal, and until then may go on: make sure that it stops.")?;
    }
    Ok(0)
}

pub(crate) fn cleanup(at: &At, cleanup: &Cleanup) -> Ended {
    let operator = look(at)?.operator();
    let mut deleted = 0;
    loop {
        let some: Asked<u64> = operator.cleanup_expired(cleanup.batch);
        let some = some?;
        deleted += some;
        if some < u64::from(cleanup.batch) {
            break;
        }
    }
    if at.json {
        print_json(&json!({ "deleted": deleted }))?;
    } else {
        print(&format!("deleted {deleted} rows of expired leases"))?;
    }
    Ok(0)
}

pub(crate) fn set_up(at: &At) -> Ended {
    let client = connect(at)?;
    client.setup_schema()?;
    let counts = client.operator().counts()?;
    if at.json {
        print_json(&json!({ "ready": true, "held": counts.live, "counters": counts.counters }))?;
    } else {
        print(&format!(
            "the tables are there; locks held: {}, keys locked so far: {}",
            counts.live, counts.counters
        ))?;
    }
    Ok(0)
}

//! `cleanup`, `setup`.

use serde_json::json;
use syncguard::Result as Asked;

use crate::args::{At, Cleanup};
use crate::connection::{connect, look};
use crate::failure::Ended;
use crate::output::{print, print_json};

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
        print(&format!("{deleted} rows of leases that were over are deleted"))?;
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
            "the tables are there: {} held, {} keys were locked so far",
            counts.live, counts.counters
        ))?;
    }
    Ok(0)
}

//! Switches that take one safeguard out each, so that the fault tests can show that they would
//! notice. Behind the feature `sabotage`, which does not compile without debug assertions: a release
//! build cannot contain them. `SYNCGUARD_SABOTAGE` names the switches of a process, with commas.
//!
//! | switch | what is missing |
//! | --- | --- |
//! | `row-lock` | decisions on the locked row |
//! | `counter-lock` | the look whether somebody has the key's counter locked |
//! | `upsert-condition` | the condition that the upsert repeats |
//! | `advisory-lock` | the queue of contenders; safety must not depend on it |
//! | `clock` | the clock after the waits: `now()` stands still from the start of the transaction |
//! | `durable` | durable commits of acquire and extend |
//! | `deadline` | the local deadline that is counted from the request: from the reply instead |
//! | `patience` | no safeguard: statements are called by the driver's extended protocol from the first call on |

#[cfg(all(feature = "sabotage", not(debug_assertions)))]
compile_error!("the feature `sabotage` breaks the library on purpose: it is for debug builds of its tests");

/// Whether this process runs without that safeguard.
#[cfg(feature = "sabotage")]
pub(crate) fn on(switch: &str) -> bool {
    std::env::var("SYNCGUARD_SABOTAGE").is_ok_and(|list| list.split(',').any(|name| name == switch))
}

/// Never.
#[cfg(not(feature = "sabotage"))]
pub(crate) const fn on(_switch: &str) -> bool {
    false
}

/// A statement's text, without the safeguards that are switched off.
#[cfg(feature = "sabotage")]
pub(crate) fn sql(text: String) -> String {
    cut(text, &on)
}

/// The text without these safeguards.
#[cfg(feature = "sabotage")]
pub(crate) fn cut(mut text: String, on: &dyn Fn(&str) -> bool) -> String {
    const CUTS: [(&str, &str, &str); 11] = [
        ("row-lock", " FOR UPDATE OF l SKIP LOCKED", ""),
        ("counter-lock", " FOR NO KEY UPDATE OF c SKIP LOCKED", ""),
        ("row-lock", " FOR UPDATE OF l", ""),
        ("row-lock", " FOR UPDATE SKIP LOCKED", ""),
        ("row-lock", " FOR UPDATE", ""),
        ("advisory-lock", "pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext($1)::pg_catalog.int8)", "$1"),
        (
            "advisory-lock",
            "pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext($1)::pg_catalog.int8)",
            "true",
        ),
        (
            "upsert-condition",
            "ON CONFLICT (key) DO NOTHING",
            "ON CONFLICT (key) DO UPDATE SET lock_id = EXCLUDED.lock_id, expires_at_ms = EXCLUDED.expires_at_ms, \
             acquired_at_ms = EXCLUDED.acquired_at_ms, fence = EXCLUDED.fence",
        ),
        ("clock", "pg_catalog.clock_timestamp()", "pg_catalog.now()"),
        ("durable", "ARRAY['off', 'local']", "ARRAY['on', 'local']"),
        ("durable", "'synchronous_commit', 'on'", "'synchronous_commit', 'off'"),
    ];
    for (switch, safeguard, without) in CUTS {
        if on(switch) {
            text = text.replace(safeguard, without);
        }
    }
    let upsert = text.split_once("user_key = EXCLUDED.user_key");
    let condition = upsert.and_then(|(before, after)| Some((before, after.split_once(" RETURNING ")?.1)));
    match condition {
        Some((before, after)) if on("upsert-condition") => {
            format!("{before}user_key = EXCLUDED.user_key RETURNING {after}")
        }
        _ => text,
    }
}

/// The text as it is.
#[cfg(not(feature = "sabotage"))]
pub(crate) fn sql(text: String) -> String {
    text
}

//! How long a wide set waits beside clients that keep taking single keys of it: measured, for docs/several-keys.md.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use syncguard::{LockOptions, PgLockClient};

use crate::support::{self, LIMIT};

const KEYS: usize = 8;

/// For so long each, with a hold and a pause of so many milliseconds of each single-key client. With a gate
/// everybody takes one more key first, and holds that until it has got its own.
fn measure(time: Duration, (hold, pause): (u64, u64), gate: bool) -> String {
    let schema = support::schema();
    let connect = || PgLockClient::connect(&schema.url()).unwrap();
    let keys: Vec<String> = (0..KEYS).map(|n| format!("k{n}-{}", schema.name())).collect();
    let (over, singles, set) = (AtomicBool::new(false), AtomicU64::new(0), connect());
    let (mut waits, mut unanswered) = (Vec::new(), None);
    let options = LockOptions::new().timeout(LIMIT);
    let gate = gate.then(|| format!("gate-{}", schema.name()));
    let through = |client: &PgLockClient| gate.as_ref().map(|gate| client.lock_with(gate, &options).unwrap());
    std::thread::scope(|scope| {
        for key in &keys {
            let (client, over, singles, options, through) = (connect(), &over, &singles, &options, &through);
            scope.spawn(move || {
                while !over.load(Ordering::SeqCst) {
                    let passed = through(&client);
                    let guard = client.lock_with(key, options).unwrap();
                    drop(passed);
                    std::thread::sleep(Duration::from_millis(hold));
                    let _ = guard.release().unwrap();
                    singles.fetch_add(1, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(pause));
                }
            });
        }
        let end = Instant::now() + time;
        while Instant::now() < end {
            let (begin, options) = (Instant::now(), LockOptions::new().timeout(time));
            let passed = through(&set);
            let result = set.lock_all_with(&keys, &options);
            drop(passed);
            match result {
                Ok(guard) => {
                    waits.push(begin.elapsed());
                    let _ = guard.release().unwrap();
                }
                Err(_) => unanswered = Some(begin.elapsed()),
            }
        }
        over.store(true, Ordering::SeqCst);
    });
    waits.sort_unstable();
    let ms =
        |wait: Option<&Duration>| wait.map_or_else(|| "–".to_owned(), |wait| wait.as_millis().to_string());
    let given_up =
        unanswered.map_or_else(|| "none".to_owned(), |wait| format!("after {} ms", wait.as_millis()));
    let gate = if gate.is_some() { "yes" } else { "no" };
    format!(
        "| {hold} ms | {pause} ms | {gate} | {} | {} | {} | {} | {given_up} |",
        singles.load(Ordering::SeqCst),
        waits.len(),
        ms(waits.get(waits.len() / 2)),
        ms(waits.last())
    )
}

/// As long as `SYNCGUARD_STARVATION_SECONDS` says, for each row: two by default, which tell little.
#[test]
fn a_set_of_eight_keys_beside_eight_busy_single_keys() {
    let seconds = std::env::var("SYNCGUARD_STARVATION_SECONDS").map_or(2, |n| n.parse().expect("a number"));
    println!(
        "| a single key is held | and left free | a gate | singles granted | sets granted | median wait of a set, ms | longest, ms | given up |\n\
         | --- | --- | --- | ---: | ---: | ---: | ---: | --- |"
    );
    let mut granted = false;
    // Free for most of the time, for half of it, and hardly at all.
    let free = [((1, 50), false), ((5, 50), false), ((10, 10), false), ((10, 0), false)];
    for (times, gate) in free.into_iter().chain([((10, 10), true), ((10, 0), true)]) {
        let row = measure(Duration::from_secs(seconds), times, gate);
        println!("{row}");
        granted |= !row.contains("| 0 | – |");
    }
    assert!(granted, "a set is granted where its keys are free at one moment");
}

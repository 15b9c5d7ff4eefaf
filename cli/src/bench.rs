//! `bench`: how long locks take on this server, from this machine.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use syncguard::{LockOptions, PgLockClient, Result as Asked};

use crate::args::{At, Bench};
use crate::connection::connect;
use crate::failure::Ended;
use crate::output::{print, print_json, table};

/// The keys' names: the same in each run, for their counters stay.
const KEYS: &str = "syncguard-bench";

struct Measured {
    what: &'static str,
    times: Vec<Duration>,
    over: Duration,
}

impl Measured {
    fn quantile(&self, percent: usize) -> Duration {
        let last = self.times.len().saturating_sub(1);
        self.times.get(last * percent / 100).copied().unwrap_or_default()
    }

    fn per_second(&self) -> f64 {
        let count = u32::try_from(self.times.len()).unwrap_or(u32::MAX);
        f64::from(count) / self.over.as_secs_f64().max(1e-9)
    }

    fn row(&self) -> Vec<String> {
        let ms = |time: Duration| format!("{:.2}", time.as_secs_f64() * 1000.0);
        let [half, most, all] = [50, 99, 100].map(|percent| ms(self.quantile(percent)));
        vec![
            self.what.to_owned(),
            half,
            most,
            all,
            format!("{:.0}", self.per_second()),
            self.times.len().to_string(),
        ]
    }

    fn json(&self) -> Value {
        let us = |percent| u64::try_from(self.quantile(percent).as_micros()).unwrap_or(u64::MAX);
        let mut fields = Map::new();
        fields.insert("what".to_owned(), json!(self.what));
        for (name, percent) in [("p50_us", 50), ("p99_us", 99), ("max_us", 100)] {
            fields.insert(name.to_owned(), json!(us(percent)));
        }
        fields.insert("per_second".to_owned(), json!(self.per_second().round()));
        fields.insert("count".to_owned(), json!(self.times.len()));
        Value::Object(fields)
    }
}

pub(crate) fn bench(at: &At, bench: &Bench) -> Ended {
    let client = connect(at)?;
    let all = [
        measure("one statement", 1, bench.time, |_| client.operator().server_time_ms().map(drop))?,
        measure("lock and release, 1 thread", 1, bench.time, |n| cycle(&client, n))?,
        measure("lock and release, 8 threads", 8, bench.time, |n| cycle(&client, n))?,
        hand_over(at, &client, bench.time)?,
    ];
    if at.json {
        print_json(&Value::Array(all.iter().map(Measured::json).collect()))?;
    } else {
        let rows: Vec<_> = all.iter().map(Measured::row).collect();
        table(&["IN MILLISECONDS", "MEDIAN", "99 %", "LONGEST", "PER SECOND", "COUNT"], &rows)?;
        print(
            "One statement is a round trip that changes nothing; a lock and its release are two changes, each",
        )?;
        print(
            "of which waits for the server's disk. Measured from this machine, under the server's present load.",
        )?;
    }
    Ok(0)
}

fn cycle(client: &PgLockClient, thread: usize) -> Asked<()> {
    let patient = LockOptions::new().timeout(Duration::from_secs(10));
    client.lock_with(&format!("{KEYS}-{thread}"), &patient)?.release().map(drop)
}

/// Runs the work in so many threads for this long.
fn measure(
    what: &'static str,
    threads: usize,
    time: Duration,
    work: impl Fn(usize) -> Asked<()> + Sync,
) -> Asked<Measured> {
    // Connections are opened and statements prepared before it counts.
    (0..threads).try_for_each(&work)?;
    let begin = Instant::now();
    let repeat = |n: usize| {
        let mut times = Vec::new();
        while begin.elapsed() < time {
            let start = Instant::now();
            work(n)?;
            times.push(start.elapsed());
        }
        Ok(times)
    };
    let repeat = &repeat;
    let found: Vec<Asked<Vec<Duration>>> = thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|n| scope.spawn(move || repeat(n))).collect();
        running
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let over = begin.elapsed();
    let mut times = Vec::new();
    for some in found {
        times.extend(some?);
    }
    times.sort();
    Ok(Measured { what, times, over })
}

/// From a release to the grant of a client in another place that waits for it.
fn hand_over(at: &At, client: &PgLockClient, time: Duration) -> Result<Measured, crate::failure::Failure> {
    let other = connect(at)?;
    let key = format!("{KEYS}-handover");
    let patient = LockOptions::new().timeout(Duration::from_secs(10));
    let begin = Instant::now();
    let mut times = Vec::new();
    while begin.elapsed() < time {
        let guard = client.lock_with(&key, &patient)?;
        let released = thread::scope(|scope| -> Asked<Duration> {
            let waiter = scope.spawn(|| -> Asked<Instant> {
                let guard = other.lock_with(&key, &patient)?;
                let granted = Instant::now();
                guard.release()?;
                Ok(granted)
            });
            // Long enough for it to wait as waiters do.
            thread::sleep(Duration::from_millis(60));
            let start = Instant::now();
            guard.release()?;
            let granted = waiter.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            Ok(granted.saturating_duration_since(start))
        });
        times.push(released?);
    }
    times.sort();
    // The pauses between are not its own.
    let over = times.iter().sum();
    Ok(Measured { what: "from a release to a waiter's grant", times, over })
}

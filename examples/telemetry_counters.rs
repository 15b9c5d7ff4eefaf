//! Lock operations as counters, as a metrics endpoint would serve them.
//!
//! Run it with `cargo run --example telemetry_counters`. It needs no server: `MemoryBackend` stands
//! for any backend. A program on PostgreSQL gives the same options to its client's builder.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use syncguard::backend::LockBackend;
use syncguard::{CancelToken, LockEvent, MemoryBackend, TelemetryOptions, with_telemetry};

/// Operation and outcome.
type Labels = (&'static str, &'static str);

/// How often, and for how long in total.
#[derive(Clone, Default)]
struct Counters(Arc<Mutex<BTreeMap<Labels, (u64, Duration)>>>);

impl Counters {
    fn count(&self, event: &LockEvent) {
        // A fixed set of labels: never a key, of which there may be millions.
        let outcome = match (event.error, event.reason) {
            (Some(code), _) => code.as_str(),
            (None, Some(reason)) => reason.as_str(),
            (None, None) => event.result.as_str(),
        };
        let mut counters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (count, total) = counters.entry((event.operation.as_str(), outcome)).or_default();
        *count += 1;
        *total += event.duration;
    }

    #[allow(clippy::print_stdout)]
    fn print(&self) {
        for ((operation, outcome), (count, total)) in &*self.0.lock().unwrap_or_else(PoisonError::into_inner)
        {
            println!("lock_operations_total{{operation={operation:?},outcome={outcome:?}}} {count}");
            println!(
                "lock_operations_seconds_sum{{operation={operation:?},outcome={outcome:?}}} {:.6}",
                total.as_secs_f64()
            );
        }
    }
}

#[allow(clippy::print_stdout)]
fn main() -> syncguard::Result<()> {
    let counters = Counters::default();
    let sink = counters.clone();
    let options = TelemetryOptions::new(move |event| sink.count(event));
    let locks = with_telemetry(MemoryBackend::new(), options);

    // Four threads, three keys.
    std::thread::scope(|scope| {
        let locks = &locks;
        let running: Vec<_> = (0..4).map(|thread| scope.spawn(move || work(locks, thread))).collect();
        running.into_iter().try_for_each(|thread| thread.join().unwrap_or(Ok(())))
    })?;

    locks.handle().flush(Duration::from_secs(1));
    counters.print();
    println!("lock_events_dropped_total {}", locks.handle().dropped());
    Ok(())
}

fn work(locks: &impl LockBackend, thread: u32) -> syncguard::Result<()> {
    let never = CancelToken::never();
    for round in 0..250 {
        let key = format!("report:{}", (thread + round) % 3);
        let lease = locks.acquire(&key, Duration::from_secs(30), &never)?.acquired();
        std::thread::yield_now();
        if let Some(lease) = lease {
            locks.release(&lease.lock_id, &never)?;
        }
    }
    Ok(())
}

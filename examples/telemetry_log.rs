//! Every lock operation as a line of a log: what failed, why, and how long it took.
//!
//! Run it with `cargo run --example telemetry_log`. It needs no server: `MemoryBackend` stands for
//! any backend. A program on PostgreSQL gives the same options to its client's builder.

use std::time::Duration;

use syncguard::backend::LockBackend;
use syncguard::{CancelToken, EventResult, LockEvent, MemoryBackend, TelemetryOptions, with_telemetry};

/// Prints, so that the example shows something without a logger.
struct Screen;

impl log::Log for Screen {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    #[allow(clippy::print_stdout)]
    fn log(&self, record: &log::Record<'_>) {
        println!("{:5} {}", record.level(), record.args());
    }

    fn flush(&self) {}
}

/// One line per event. Hashes only: `syncguard::hash_key("invoice:7")` finds a key's lines again.
fn write_line(event: &LockEvent) {
    // Contention is daily life; an error is somebody's problem.
    let level = match (event.result, event.error) {
        (_, Some(_)) => log::Level::Error,
        (EventResult::Ok, None) => log::Level::Debug,
        (_, None) => log::Level::Info,
    };
    let outcome = match (event.error, event.reason) {
        (Some(code), _) => code.as_str(),
        (None, Some(reason)) => reason.as_str(),
        (None, None) => event.result.as_str(),
    };
    log::log!(
        level,
        "lock {} {outcome} key={} id={} in {:?}",
        event.operation,
        event.key_hash.as_deref().unwrap_or("-"),
        event.lock_id_hash.as_deref().unwrap_or("-"),
        event.duration
    );
}

fn main() -> syncguard::Result<()> {
    if log::set_logger(&Screen).is_ok() {
        log::set_max_level(log::LevelFilter::Debug);
    }
    let never = CancelToken::never();
    let ttl = Duration::from_secs(30);
    let locks = with_telemetry(MemoryBackend::new(), TelemetryOptions::new(write_line));

    if let Some(lease) = locks.acquire("invoice:7", ttl, &never)?.acquired() {
        let _ = locks.acquire("invoice:7", ttl, &never)?; // locked
        let _ = locks.release(&lease.lock_id, &never)?;
        let _ = locks.release(&lease.lock_id, &never)?; // not-found
    }
    let _ = locks.acquire("", ttl, &never); // InvalidArgument

    // The drop of `locks` would wait for the lines as well.
    locks.handle().flush(Duration::from_secs(1));
    Ok(())
}

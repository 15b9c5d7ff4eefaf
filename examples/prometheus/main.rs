//! Metrics for Prometheus: a program that works under locks, and shows its metrics over HTTP as text.
//!
//! ```sh
//! SYNCGUARD_URL=postgresql://app@localhost/app cargo run --features metrics --example prometheus
//! curl http://127.0.0.1:9464/metrics
//! ```
//!
//! `dashboard.json` beside this file is a dashboard for Grafana over these metrics.

use std::env;
use std::error::Error;
use std::thread;
use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use syncguard::{LockOptions, PgLockClient, Slot, TelemetryOptions};
use tiny_http::{Response, Server};

/// From a round trip to a minute.
const SECONDS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 15.0, 60.0];

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let recorder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)?
        .install_recorder()?;
    let url = env::var("SYNCGUARD_URL")?;
    let client =
        PgLockClient::builder().telemetry(TelemetryOptions::new(|_| {}).with_metrics()).connect(&url)?;
    for n in 0..4 {
        let client = client.clone();
        thread::Builder::new().name(format!("worker-{n}")).spawn(move || work(&client))?;
    }
    let address = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:9464".to_owned());
    let server = Server::http(address)?;
    println!("http://{}/metrics", server.server_addr());
    for request in server.incoming_requests() {
        // Counters of names that nobody has used for long would be forgotten here.
        recorder.run_upkeep();
        request.respond(Response::from_string(recorder.render()))?;
    }
    Ok(())
}

/// A bit of everything, again and again: keys that several want, a set, a permit, a job once a second.
fn work(client: &PgLockClient) {
    let options = LockOptions::new().ttl(Duration::from_secs(3)).timeout(Duration::from_secs(10));
    loop {
        if let Err(error) = round(client, &options) {
            eprintln!("{}", error.chain());
            thread::sleep(Duration::from_secs(1));
        }
    }
}

fn round(client: &PgLockClient, options: &LockOptions) -> syncguard::Result<()> {
    let guard = client.lock_with("demo:report", options)?;
    thread::sleep(Duration::from_millis(20));
    guard.release()?;
    // Long enough to be renewed.
    if let Some(guard) = client.try_lock_with("demo:import", options)? {
        thread::sleep(Duration::from_millis(1500));
        drop(guard);
    }
    drop(client.lock_all_with(&["demo:a", "demo:b"], options)?);
    drop(client.semaphore("demo:workers", 2)?.acquire_with(options)?);
    let _ = client.run_once("demo:job", Slot::every(Duration::from_secs(1)), options, |_| Ok::<_, ()>(()))?;
    // What is lost: a lease that nobody renews, held for longer than it lasts.
    let brief = options.clone().heartbeat(syncguard::Heartbeat::Off).max_hold(Duration::from_millis(50));
    if let Some(guard) = client.try_lock_with("demo:brief", &brief)? {
        let _ = guard.lost().wait_timeout(Duration::from_secs(5));
    }
    Ok(())
}

//! What recorder and subscriber are told: of each lock, in numbers that add up, and never its key.

use std::fmt::{Debug, Write as _};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use metrics_exporter_prometheus::PrometheusBuilder;
use syncguard::{Heartbeat, LockOptions, PgLockClient, TelemetryOptions};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::support::{LIMIT, TTL, schema, wait_until};

/// Writes events down as lines.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = write!(self.0, " {}={value:?}", field.name());
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("syncguard")
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut line = Line(format!("{} {}", event.metadata().level(), event.metadata().target()));
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn numbers_add_up_levels_come_down_again_and_no_key_is_told() {
    let _alone = crate::support::alone();
    let recorder = PrometheusBuilder::new().set_buckets(&[1.0]).unwrap().install_recorder().unwrap();
    let lines = Lines::default();
    tracing::subscriber::set_global_default(lines.clone()).unwrap();
    let value = |series: &str| -> Option<f64> {
        let text = recorder.render();
        let found = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok());
        assert!(!text.contains("MARKER"), "{text}");
        found
    };
    let schema = schema();
    let options = TelemetryOptions::new(|_| {}).include_raw(true).with_metrics().with_tracing();
    let client =
        PgLockClient::builder().max_connections(3).telemetry(options).connect(&schema.url()).unwrap();
    let flush = || assert!(client.telemetry().unwrap().flush(LIMIT));

    let held = client.lock("MARKER one").unwrap();
    let waiting = {
        let client = client.clone();
        thread::spawn(move || client.lock_with("MARKER one", &LockOptions::new().timeout(LIMIT)).map(drop))
    };
    wait_until(LIMIT, "one waits and one is held", || {
        flush();
        (value("syncguard_waiters"), value("syncguard_held")) == (Some(1.0), Some(1.0))
    });
    assert!(client.try_lock("MARKER one").unwrap().is_none());
    drop(held);
    waiting.join().unwrap().unwrap();
    client.lock_all(&["MARKER a", "MARKER b"]).unwrap().release().unwrap();
    drop(client.semaphore("MARKER s", 2).unwrap().acquire().unwrap());
    client.elect("MARKER e", &LockOptions::new(), |_| ControlFlow::Break(())).unwrap();
    let brief = LockOptions::new().max_hold(Duration::from_millis(20)).ttl(TTL);
    let lost = client.lock_with("MARKER lost", &brief).unwrap();
    assert!(lost.lost().wait_timeout(LIMIT));
    drop(lost);
    let often = LockOptions::new().ttl(TTL).heartbeat(Heartbeat::Every(Duration::from_millis(200)));
    let renewed = client.lock_with("MARKER renewed", &often).unwrap();
    wait_until(LIMIT, "a renewal was told", || {
        flush();
        value("syncguard_renewal_gap_seconds_count{kind=\"lock\"}").is_some()
    });
    drop(renewed);
    wait_until(LIMIT, "the loss was told", || {
        flush();
        value("syncguard_lost_total{kind=\"lock\",reason=\"max_hold\"}") == Some(1.0)
    });

    for (series, expected) in [
        ("syncguard_calls_total{kind=\"lock\",result=\"granted\"}", 4.0),
        ("syncguard_calls_total{kind=\"lock\",result=\"busy\"}", 1.0),
        ("syncguard_calls_total{kind=\"set\",result=\"granted\"}", 1.0),
        ("syncguard_calls_total{kind=\"permit\",result=\"granted\"}", 1.0),
        ("syncguard_calls_total{kind=\"term\",result=\"granted\"}", 1.0),
        ("syncguard_wait_seconds_count{kind=\"lock\"}", 4.0),
        ("syncguard_held_seconds_count{kind=\"lock\"}", 4.0),
        ("syncguard_held_seconds_count{kind=\"set\"}", 1.0),
        ("syncguard_waiters", 0.0),
        ("syncguard_held", 0.0),
        ("syncguard_connections_max", 3.0),
        ("syncguard_events_dropped_total", 0.0),
    ] {
        assert_eq!(value(series), Some(expected), "{series}\n{}", recorder.render());
    }
    let gap = value("syncguard_renewal_gap_seconds_sum{kind=\"lock\"}").unwrap();
    assert!(gap >= 0.1, "the time between two renewals: {gap}");
    assert!(value("syncguard_operations_total{operation=\"acquire\",result=\"locked\"}").unwrap() >= 1.0);

    drop(client);
    wait_until(LIMIT, "what is gone has no connections", || value("syncguard_connections_max") == Some(0.0));
    let lines = lines.0.lock().unwrap();
    let whole: Vec<_> = lines.iter().filter(|line| line.contains("syncguard::lock")).collect();
    assert_eq!(whole.len(), 8, "{whole:#?}");
    let find =
        |words: &[&str]| whole.iter().filter(|line| words.iter().all(|word| line.contains(word))).count();
    assert_eq!(
        find(&["INFO", "kind=\"lock\"", "ending=\"released\"", "attempts=", "held_ms=", "waited_ms="]),
        3
    );
    assert_eq!(find(&["WARN", "ending=\"lost\"", "reason=\"max_hold\""]), 1);
    assert_eq!(find(&["ending=\"busy\""]), 1);
    assert_eq!(find(&["kind=\"set\"", "keys=2"]), 1);
    assert!(lines.iter().any(|line| line.starts_with("DEBUG syncguard::operation operation=\"acquire\"")));
    assert!(!lines.iter().any(|line| line.contains("MARKER")), "{lines:#?}");
}

//! The same over TLS, where nobody between client and server sees messages: cut at every byte, and
//! silence. What the driver hears of it differs, the answers and bounds may not.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use openssl::ssl::{SslConnector, SslMethod, SslVerifyMode};
use postgres::config::SslMode;
use postgres_openssl::MakeTlsConnector;
use syncguard::{AcquireResult, ExtendResult, LockOptions, PgLockClient, ReleaseResult};

use crate::support::{Config, LIMIT, Server, wait_for, wait_until};

const TTL: Duration = Duration::from_secs(30);

/// Carries bytes, and knows nothing of what they mean.
struct Wire {
    port: u16,
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    server: u16,
    /// How many more bytes pass on the way to the server and back; then everything is cut, once.
    to_server: AtomicI64,
    to_client: AtomicI64,
    /// How many passed since the last [`Wire::limit`].
    passed_to_server: AtomicI64,
    passed_to_client: AtomicI64,
    mute: AtomicBool,
    open: Mutex<Vec<TcpStream>>,
}

impl Wire {
    fn start(server: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let inner = Arc::new(Inner { server, ..Inner::default() });
        inner.limit(i64::MAX, i64::MAX);
        let there = Arc::downgrade(&inner);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Some(inner) = there.upgrade() else { return };
                let Ok(server) = TcpStream::connect(("127.0.0.1", inner.server)) else { continue };
                let _ = (client.set_nodelay(true), server.set_nodelay(true));
                let both = [client.try_clone().unwrap(), server.try_clone().unwrap()];
                inner.open.lock().unwrap().extend(both);
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let second = Arc::clone(&inner);
                thread::spawn(move || second.pump(from, &to, true));
                thread::spawn(move || inner.pump(server, &client, false));
            }
        });
        Self { port, inner }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.inner.mute.store(false, Ordering::SeqCst);
        self.inner.cut_all();
    }
}

impl Inner {
    fn limit(&self, to_server: i64, to_client: i64) {
        self.passed_to_server.store(0, Ordering::SeqCst);
        self.passed_to_client.store(0, Ordering::SeqCst);
        self.to_server.store(to_server, Ordering::SeqCst);
        self.to_client.store(to_client, Ordering::SeqCst);
    }

    fn cut_all(&self) {
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn pump(&self, mut from: TcpStream, mut to: &TcpStream, out: bool) {
        let (left, passed) = if out {
            (&self.to_server, &self.passed_to_server)
        } else {
            (&self.to_client, &self.passed_to_client)
        };
        let mut bytes = [0; 16 * 1024];
        while let Ok(n @ 1..) = from.read(&mut bytes) {
            while self.mute.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(5));
            }
            let n = i64::try_from(n).unwrap();
            passed.fetch_add(n, Ordering::SeqCst);
            let may = left.fetch_sub(n, Ordering::SeqCst);
            let pass = usize::try_from(may.clamp(0, n)).unwrap();
            let over = to.write_all(&bytes[..pass]).is_err();
            if may < n {
                // Once: the next connection is whole.
                self.to_server.store(i64::MAX, Ordering::SeqCst);
                self.to_client.store(i64::MAX, Ordering::SeqCst);
                self.cut_all();
            }
            if over || may < n {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }
}

struct Bench {
    server: Server,
    wire: Wire,
    client: PgLockClient,
}

fn bench(limit: Duration) -> Bench {
    let server = Server::start(&Config::new());
    crate::support::tls::install(&server);
    server.configure("ssl", "on");
    let wire = Wire::start(server.port());
    let mut tls = SslConnector::builder(SslMethod::tls()).unwrap();
    // Who the server is does not matter here.
    tls.set_verify(SslVerifyMode::NONE);
    let mut led = postgres::Config::new();
    led.host("127.0.0.1").port(wire.port).user("postgres").dbname("postgres").ssl_mode(SslMode::Require);
    let tls = MakeTlsConnector::new(tls.build());
    // The tables and the first handshake need more time than a test may give to a call.
    let client = wait_for(LIMIT, "the server takes TLS", || {
        let builder = PgLockClient::builder().operation_timeout(limit).connection_timeout(limit);
        builder.dispose_timeout(limit).connect_with(led.clone(), tls.clone()).ok()
    });
    Bench { server, wire, client }
}

/// Each place at which one call's bytes can be cut, on the way out and back; the call must be whole again
/// by the end of `shot`.
fn sweep(bench: &Bench, mut shot: impl FnMut(&str)) -> usize {
    let inner = &bench.wire.inner;
    let mut cuts = 0;
    // As long as nothing is cut, the size is measured.
    let mut sizes = (600, 600);
    for out in [true, false] {
        let step = if crate::long() { 1 } else { 7 };
        let mut at = 0;
        while at < if out { sizes.0 } else { sizes.1 } {
            bench.client.is_locked("warm").expect("the network is whole");
            if out {
                inner.limit(at, i64::MAX);
            } else {
                inner.limit(i64::MAX, at);
            }
            shot(&format!("cut at {at}, out: {out}"));
            let cut = if out {
                inner.to_server.load(Ordering::SeqCst)
            } else {
                inner.to_client.load(Ordering::SeqCst)
            };
            if cut < i64::MAX - 1_000_000_000 {
                // It passed in full: so long is the message.
                if out { sizes.0 = at } else { sizes.1 = at }
            } else {
                cuts += 1;
            }
            at += step;
        }
    }
    cuts
}

#[test]
fn calls_that_are_cut_anywhere_within_tls_answer_with_the_truth() {
    let bench = bench(Duration::from_secs(5));
    let mut sql = bench.server.client();
    let mut row = |key: &str| -> Option<(String, i64)> {
        let row = sql.query_opt("SELECT lock_id, expires_at_ms FROM syncguard_locks WHERE key = $1", &[&key]);
        row.unwrap().map(|row| (row.get(0), row.get(1)))
    };
    let mut n = 0;
    let acquires = sweep(&bench, |place| {
        n += 1;
        let key = format!("acquire:{n}");
        let granted = bench.client.acquire(&key, TTL).unwrap_or_else(|error| panic!("{place}: {error}"));
        let AcquireResult::Acquired(granted) = granted else { panic!("{place}: nobody else is there") };
        assert_eq!(granted.fence.get(), 1, "{place}: a fence was burnt");
        assert_eq!(row(&key), Some((granted.lock_id, granted.expires_at_ms)), "{place}");
    });
    let held = bench.client.acquire("held", TTL).unwrap().acquired().unwrap();
    let extends = sweep(&bench, |place| {
        let extended =
            bench.client.extend(&held.lock_id, TTL).unwrap_or_else(|error| panic!("{place}: {error}"));
        let ExtendResult::Extended { expires_at_ms } = extended else { panic!("{place}: it is held") };
        assert_eq!(row("held"), Some((held.lock_id.clone(), expires_at_ms)), "{place}");
    });
    let (direct, mut unknown) = (PgLockClient::connect(bench.server.url()).unwrap(), 0);
    let releases = sweep(&bench, |place| {
        n += 1;
        let key = format!("release:{n}");
        // Over another connection: the client's is armed.
        let granted = direct.acquire(&key, TTL).unwrap().acquired().expect("nobody else is there");
        match bench.client.release(&granted.lock_id) {
            Ok(ReleaseResult::Released) => {}
            Err(error) if error.is_outcome_unknown() => unknown += 1,
            other => panic!("{place}: {other:?}"),
        }
        assert_eq!(row(&key), None, "{place}");
    });
    println!(
        "cut within TLS: {acquires} acquires, {extends} extends, {releases} releases, of which {unknown} unknown"
    );
    assert!(acquires.min(extends).min(releases) > 12, "{acquires} {extends} {releases}");
    assert!(unknown > 0, "an answer to a commit was lost");
}

#[test]
fn every_call_is_bounded_within_tls_too() {
    let limit = Duration::from_millis(500);
    for frozen in [true, false] {
        let bench = bench(limit);
        let client = &bench.client;
        let guard = wait_for(LIMIT, "it is granted in time", || client.lock("held").ok());
        if frozen {
            bench.server.freeze();
        } else {
            bench.wire.inner.mute.store(true, Ordering::SeqCst);
        }
        let timed = |what: &str, call: &dyn Fn() -> bool| {
            let start = Instant::now();
            assert!(call(), "{what} cannot have worked");
            assert!(start.elapsed() < limit + Duration::from_secs(1), "{what} took {:?}", start.elapsed());
        };
        let options = LockOptions::new().timeout(limit);
        timed("acquire", &|| client.acquire("k", TTL).is_err());
        timed("extend", &|| guard.extend(TTL).is_err());
        timed("is_locked", &|| client.is_locked("k").is_err());
        timed("lock", &|| client.lock_with("k", &options).is_err());
        timed("release", &|| client.release(guard.lock_id()).is_err());
        let start = Instant::now();
        drop(guard);
        assert!(start.elapsed() < limit + Duration::from_secs(1), "a drop took {:?}", start.elapsed());
        let start = Instant::now();
        let _ = client.close(limit);
        assert!(start.elapsed() < limit + Duration::from_secs(1), "close took {:?}", start.elapsed());
        bench.server.thaw();
    }
}

#[test]
fn an_acquire_that_is_silenced_within_tls_is_unknown_and_let_go() {
    let bench = bench(Duration::from_millis(600));
    wait_until(LIMIT, "the connection is open", || bench.client.is_locked("warm").is_ok());
    bench.wire.inner.mute.store(true, Ordering::SeqCst);
    let error = bench.client.acquire("k", TTL).expect_err("nothing arrives");
    assert!(error.is_outcome_unknown(), "{error}");
    bench.wire.inner.mute.store(false, Ordering::SeqCst);
    let mut sql = bench.server.client();
    // The bytes of the client that gave up arrive now, and take the key: until it is let go.
    let mut counter = || sql.query_opt("SELECT FROM syncguard_fence_counters", &[]).unwrap().is_some();
    wait_until(LIMIT, "the late request has arrived", &mut counter);
    let direct = PgLockClient::connect(bench.server.url()).unwrap();
    wait_until(LIMIT / 3, "what arrived late is let go", || !direct.is_locked("k").unwrap());
}

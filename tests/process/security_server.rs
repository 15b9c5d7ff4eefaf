//! A server that answers whatever it likes, in messages that are well formed: wrong types, NULL, numbers
//! out of every range, too few rows, errors of every kind. No call may panic, hang, or grant a lock
//! with a fence that is none.
//!
//! `SYNCGUARD_HOSTILE_SERVERS` is how many such servers are met (default: 200).

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{LIMIT, together};
use syncguard::{
    AcquireResult, AdvisoryKey, AdvisoryOptions, CancelToken, FENCE_MAX, LockBackend, LockError, LockOptions,
    Lookup, PgLockClient,
};

const TTL: Duration = Duration::from_secs(5);
const LOCK_ID: &str = "AAAAAAAAAAAAAAAAAAAAAA";

/// The same numbers for the same seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % sides
    }

    fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.roll(from.len())]
    }
}

const VALUES: &[&str] = &[
    "",
    "t",
    "f",
    "1",
    "0",
    "-1",
    "42",
    "999999999999999",
    "900000000000000",
    "900000000000001",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775808",
    "1e9",
    "NaN",
    "Infinity",
    "000000000000001",
    "00000000000000x",
    "-00000000000001",
    LOCK_ID,
    "MARKER",
    "public",
    "UTF8",
    "\u{1f512}",
    "a\"b",
    "$1",
    "'",
    "4102444800000",
    "1764300000000",
    "{1,2}",
    "2026-11-28",
];

const STATES: &[&str] = &[
    "00000", "01000", "08006", "0A000", "22012", "22P02", "23505", "25006", "25P02", "25P03", "26000",
    "28P01", "3D000", "40001", "40P01", "42501", "42P01", "42P05", "53100", "53200", "53300", "55P03",
    "57014", "57P01", "57P03", "57P05", "58030", "XX000", "ZZZZZ", "",
];

/// Those with texts that repeat values.
const QUOTING: &[&str] = &["22P02", "23505", "22012", "XX000", "0A000"];

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 4).unwrap();
    [&[kind][..], &length.to_be_bytes(), body].concat()
}

fn short(n: usize) -> [u8; 2] {
    u16::try_from(n).unwrap().to_be_bytes()
}

fn refusal(dice: &mut Dice) -> Vec<u8> {
    let mut body = Vec::new();
    let severity = dice.pick(&["ERROR", "FATAL", "WARNING", "?"]);
    let state = dice.pick(STATES);
    // Where PostgreSQL repeats values: in some messages, in what functions raise, in the context.
    let (words, detail, context, routine) = match dice.roll(3) {
        0 => ("MARKER key and MARKER lock id", "MARKER", "", "exec_stmt_raise"),
        1 => ("out of memory", "MARKER", "SQL statement \"SELECT 'MARKER'\"", "x"),
        _ if QUOTING.contains(&state) => ("value MARKER", "Key (lock_id)=(MARKER) already exists.", "", "x"),
        _ => ("out of memory", "", "", "x"),
    };
    let fields = [
        (b'S', severity),
        (b'V', severity),
        (b'C', state),
        (b'M', words),
        (b'D', detail),
        (b'W', context),
        (b'R', routine),
    ];
    for (field, text) in fields.into_iter().filter(|(field, text)| !text.is_empty() || *field == b'C') {
        body.push(field);
        body.extend_from_slice(text.as_bytes());
        body.push(0);
    }
    body.push(0);
    message(b'E', &body)
}

/// The columns of an answer.
fn description(columns: usize, dice: &mut Dice) -> Vec<u8> {
    let mut body = short(columns).to_vec();
    for n in 0..columns {
        let oid: u32 = [20, 25, 16, 23, 1184, 705, 17][dice.roll(7)];
        body.extend_from_slice(format!("c{n}\0").as_bytes());
        body.extend_from_slice(
            &[&0_u32.to_be_bytes()[..], &[0, 0], &oid.to_be_bytes(), &[0, 8], &[255; 4], &[0, 0]].concat(),
        );
    }
    message(b'T', &body)
}

fn data(values: &[Option<&str>]) -> Vec<u8> {
    let mut body = short(values.len()).to_vec();
    for value in values {
        match value {
            None => body.extend_from_slice(&[255; 4]),
            Some(text) => {
                body.extend_from_slice(&u32::try_from(text.len()).unwrap().to_be_bytes());
                body.extend_from_slice(text.as_bytes());
            }
        }
    }
    message(b'D', &body)
}

fn rows(columns: usize, dice: &mut Dice) -> Vec<u8> {
    let mut answer = Vec::new();
    for _ in 0..[1, 1, 1, 1, 0, 2][dice.roll(6)] {
        let values: Vec<_> = (0..columns).map(|_| (dice.roll(5) > 0).then(|| dice.pick(VALUES))).collect();
        answer.extend(data(&values));
    }
    answer
}

fn ready(dice: &mut Dice) -> Vec<u8> {
    message(b'Z', &[[b'I', b'I', b'I', b'T', b'E'][dice.roll(5)]])
}

/// What a simple query is answered: most of the time as many results as it has statements.
fn results(sql: &str, dice: &mut Dice) -> Vec<u8> {
    let mut answer = Vec::new();
    if sql.contains("to_regclass") && dice.roll(5) > 0 {
        // That it is PostgreSQL, and where the tables are, so that there is something to do.
        let facts = ["PostgreSQL 15.18", "read committed", "on", "700 0", "t", "1", "f"].map(Some);
        let known = ["public", "p", "public", "p", "t", "t", "public", "UTF8", "t", "f", "f"].map(Some);
        for row in [&facts[..], &[&known[..], &[None; 4]].concat()] {
            answer.extend(description(row.len(), dice));
            answer.extend(data(row));
            answer.extend(message(b'C', b"SELECT 1\0"));
        }
        answer.extend(message(b'Z', b"I"));
        return answer;
    }
    // So that some calls come far: rows that fit what was asked.
    let fitting = match dice.roll(5) {
        0 => None,
        _ if sql.contains("PREPARE") => Some(["300", "2026-11-28", "7", "", ""].map(Some)),
        1 | 2 => Some([Some("4102444800000"), Some("000000000000001"), Some("1"), Some("1"), Some(LOCK_ID)]),
        _ => None,
    };
    for _ in 0..sql.split(';').count() {
        if let Some(row) = fitting {
            answer.extend(description(row.len(), dice));
            answer.extend(data(&row));
            answer.extend(message(b'C', b"SELECT 1\0"));
            continue;
        }
        if dice.roll(25) == 0 {
            answer.extend(refusal(dice));
            break;
        }
        let columns = dice.roll(9);
        answer.extend(description(columns, dice));
        answer.extend(rows(columns, dice));
        answer.extend(message(b'C', b"SELECT 1\0"));
    }
    answer.extend(ready(dice));
    answer
}

fn read(stream: &mut TcpStream, first: bool) -> io::Result<(u8, Vec<u8>)> {
    let mut kind = [0];
    if !first {
        stream.read_exact(&mut kind)?;
    }
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut body = vec![0; usize::try_from(u32::from_be_bytes(length)).unwrap() - 4];
    stream.read_exact(&mut body)?;
    Ok((kind[0], body))
}

fn serve(mut stream: TcpStream, mut dice: Dice) -> io::Result<()> {
    read(&mut stream, true)?;
    if dice.roll(12) == 0 {
        return stream.write_all(&refusal(&mut dice));
    }
    stream.write_all(&message(b'R', &[0; 4]))?;
    stream.write_all(&message(b'S', b"client_encoding\0UTF8\0"))?;
    stream.write_all(&message(b'K', &[0, 0, 0, 7, 0, 0, 0, 9]))?;
    stream.write_all(&message(b'Z', b"I"))?;
    let (mut answer, mut columns) = (Vec::new(), 0);
    loop {
        let (kind, body) = read(&mut stream, false)?;
        match kind {
            b'Q' => answer.extend(results(&String::from_utf8_lossy(&body), &mut dice)),
            b'P' => answer.extend(message(b'1', &[])),
            b'D' => {
                let parameters = dice.roll(4);
                let oids: Vec<u8> = (0..parameters).flat_map(|_| 25_u32.to_be_bytes()).collect();
                answer.extend(message(b't', &[&short(parameters)[..], &oids].concat()));
                columns = dice.roll(9);
                answer.extend(description(columns, &mut dice));
            }
            b'B' => answer.extend(message(b'2', &[])),
            b'E' => {
                answer.extend(rows(columns, &mut dice));
                answer.extend(message(b'C', b"SELECT 1\0"));
            }
            b'C' => answer.extend(message(b'3', &[])),
            b'S' => answer.extend(ready(&mut dice)),
            _ => return Ok(()),
        }
        if matches!(kind, b'Q' | b'S') {
            match dice.roll(60) {
                // Mute for good, or gone in the middle.
                0 => while read(&mut stream, false).is_ok() {},
                1 => return stream.write_all(&answer[..answer.len() / 2]),
                2 => stream.write_all(&refusal(&mut dice))?,
                _ => stream.write_all(&answer)?,
            }
            answer.clear();
        }
    }
}

/// A port where such a server listens for as long as the process runs.
fn start(seed: u64) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for (n, stream) in listener.incoming().map_while(Result::ok).enumerate() {
            let dice = Dice(seed.wrapping_mul(1_000_003).wrapping_add(u64::try_from(n).unwrap()));
            thread::spawn(move || drop(serve(stream, dice)));
        }
    });
    port
}

/// One call: it returns in time, and what it says names nothing that the server said.
#[track_caller]
fn call<T>(what: &str, seed: u64, act: impl FnOnce() -> Result<T, LockError>) -> Option<T> {
    let start = Instant::now();
    let answer = act();
    assert!(start.elapsed() < LIMIT, "seed {seed}: {what} took {:?}", start.elapsed());
    answer
        .map_err(|error| {
            let mut next: Option<&(dyn std::error::Error + 'static)> = Some(&error);
            while let Some(cause) = next {
                let shown = format!("{cause} {cause:?}");
                assert!(!shown.contains("MARKER"), "seed {seed}, {what}: {shown}");
                next = cause.source();
            }
        })
        .ok()
}

fn meet(seed: u64, grants: &AtomicU64) {
    let port = start(seed);
    let builder = PgLockClient::builder()
        .auto_create_tables(seed.is_multiple_of(4))
        .cleanup_in_is_locked(seed.is_multiple_of(3))
        .max_connections(2)
        .connection_timeout(Duration::from_millis(300))
        .operation_timeout(Duration::from_millis(300))
        .dispose_timeout(Duration::from_millis(100));
    let url = format!("postgresql://postgres:MARKER@127.0.0.1:{port}/postgres?sslmode=disable");
    let Some(client) = call("connect", seed, || builder.connect(&url)) else { return };
    for token in [CancelToken::never(), CancelToken::new()] {
        if let Some(AcquireResult::Acquired(grant)) =
            call("acquire", seed, || LockBackend::acquire(&client, "MARKER", TTL, &token))
        {
            grants.fetch_add(1, Ordering::Relaxed);
            assert!(grant.fence.get() <= FENCE_MAX && grant.lock_id != LOCK_ID, "seed {seed}: {grant:?}");
        }
        call("extend", seed, || LockBackend::extend(&client, LOCK_ID, TTL, &token));
        call("is_locked", seed, || LockBackend::is_locked(&client, "MARKER", &token));
        for lookup in [Lookup::Key("MARKER"), Lookup::LockId(LOCK_ID)] {
            call("lookup", seed, || client.lookup_raw(lookup, &token));
        }
        call("release", seed, || LockBackend::release(&client, LOCK_ID, &token));
    }
    let operator = client.operator();
    call("counts", seed, || operator.counts());
    call("holders", seed, || operator.holders(3));
    call("waiters", seed, || operator.blocked("MARKER"));
    call("break", seed, || operator.break_lock("MARKER", "a test"));
    call("cleanup", seed, || operator.cleanup_expired(3));
    call("idle", seed, || operator.idle_counters(TTL, 3));
    let options = LockOptions::new().ttl(TTL).timeout(Duration::from_millis(50));
    if let Some(guard) = call("lock", seed, || client.lock_with("MARKER", &options)) {
        call("guard.extend", seed, || guard.extend(TTL));
        drop(guard);
    }
    let key = AdvisoryKey::from_i64(1);
    call("holders of session locks", seed, || client.advisory_holders());
    call("waiters for session locks", seed, || client.advisory_waiters());
    call("terminate", seed, || client.terminate_advisory_session(1));
    let short =
        AdvisoryOptions::new().timeout(Duration::from_millis(50)).max_hold(Duration::from_millis(200));
    if let Some(guard) = call("advisory_lock", seed, || client.advisory_lock_with(&key, &short)) {
        call("release of a session lock", seed, || guard.release());
    }
    call("close", seed, || client.close(Duration::from_millis(300)));
}

#[test]
fn whatever_a_server_answers_nothing_panics_and_nothing_hangs() {
    static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let _alone = crate::support::alone();
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        // Also those on threads of ours, and those that are caught.
        PANICS.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(info.to_string());
        usual(info);
    }));
    let servers = std::env::var("SYNCGUARD_HOSTILE_SERVERS").map_or(200, |n| n.parse().expect("a number"));
    let (next, grants) = (AtomicU64::new(0), AtomicU64::new(0));
    together(8, |_| {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= servers {
                return;
            }
            meet(seed, &grants);
        }
    });
    // Not held while a panic of this very test is reported.
    let panics = std::mem::take(&mut *PANICS.lock().unwrap());
    assert!(panics.is_empty(), "{} panics: {panics:#?}", panics.len());
    assert!(grants.load(Ordering::Relaxed) > 0 || servers < 200, "no server came as far as a grant");
    eprintln!("{servers} servers, {} grants", grants.load(Ordering::Relaxed));
}

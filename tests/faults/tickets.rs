//! What the table of members says of those who wait in order, asked for again and again while a storm lasts.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use postgres::{Client, Row};

use super::history::{MS, now};
use super::registers::connect;

/// The keys that are taken in order.
pub const KEYS: [&str; 2] = ["turn0", "turn1"];

/// How long a ticket lasts from when it was refreshed, and the longest end that is believed: see `docs/adr/0048`.
pub const TICKET: u64 = 2000 * MS;
const LONGEST_MS: i64 = 5000;

/// One key in one snapshot, which was taken between two times.
#[derive(Clone, Debug)]
pub struct Tickets {
    pub key: String,
    pub from: u64,
    pub to: u64,
    /// As many grants were committed.
    pub counter: u64,
    pub held: bool,
    /// Those that are live, the first of them first.
    pub line: Vec<Ticket>,
}

#[derive(Clone, Debug)]
pub struct Ticket {
    pub id: String,
    /// The process and the number of the call that waits, where its note says so.
    pub call: Option<(u32, u64)>,
    pub since_ms: i64,
    /// How long it lasts from then on, in nanoseconds.
    pub rest: u64,
    pub priority: i32,
}

const LOOK: &str = "SELECT k.key, COALESCE(c.fence, 0), COALESCE(l.expires_at_ms + 1000 > t.now, false), \
      (SELECT array_agg(concat_ws(' ', m.lock_id, COALESCE(m.note, '-'), m.since_ms, m.expires_at_ms - t.now, m.priority) \
                        ORDER BY m.priority DESC, m.since_ms, m.lock_id COLLATE \"C\") \
         FROM syncguard_members AS m WHERE m.key = k.key AND m.role = 'w') \
    FROM unnest($1::text[]) AS k (key) \
      CROSS JOIN (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::int8 AS now OFFSET 0) AS t \
      LEFT JOIN syncguard_fence_counters AS c ON c.fence_key = 'fence:' || k.key \
      LEFT JOIN syncguard_locks AS l ON l.key = k.key";

fn ticket(text: &str) -> Option<Ticket> {
    let words: Vec<&str> = text.split(' ').collect();
    let [id, note, since, rest, priority] = words.as_slice() else { return None };
    let rest: i64 = rest.parse().ok().filter(|rest| (1..=LONGEST_MS).contains(rest))?;
    Some(Ticket {
        id: (*id).to_owned(),
        call: call_of(note),
        since_ms: since.parse().ok()?,
        rest: rest.unsigned_abs() * MS,
        priority: priority.parse().ok()?,
    })
}

/// A note names the call that takes, or waits for, a key with it: `process.number`.
pub fn call_of(note: &str) -> Option<(u32, u64)> {
    let (process, call) = note.split_once('.')?;
    Some((process.parse().ok()?, call.parse().ok()?))
}

fn tickets(row: &Row, (from, to): (u64, u64)) -> Tickets {
    let line: Option<Vec<String>> = row.get(3);
    Tickets {
        key: row.get(0),
        from,
        to,
        counter: row.get::<_, i64>(1).unsigned_abs(),
        held: row.get(2),
        line: line.unwrap_or_default().iter().filter_map(|text| ticket(text)).collect(),
    }
}

/// A thread that looks until it is told to end.
pub struct Watch {
    over: Arc<AtomicBool>,
    seen: Arc<Mutex<Vec<Tickets>>>,
    thread: thread::JoinHandle<()>,
}

impl Watch {
    /// By a connection of its own to a server whose tables are there.
    pub fn start(url: &str) -> Self {
        let (over, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (url, ends, into) = (url.to_owned(), Arc::clone(&over), Arc::clone(&seen));
        let thread = thread::spawn(move || {
            let mut sql: Option<Client> = None;
            while !ends.load(Ordering::SeqCst) {
                sql = sql.or_else(|| connect(&url));
                let from = now();
                let rows = sql.as_mut().map(|sql| sql.query(LOOK, &[&&KEYS[..]]));
                match rows {
                    Some(Ok(rows)) => {
                        let at = (from, now());
                        let mut into = into.lock().unwrap_or_else(PoisonError::into_inner);
                        into.extend(rows.iter().map(|row| tickets(row, at)));
                    }
                    _ => sql = None,
                }
                thread::sleep(Duration::from_millis(50));
            }
        });
        Self { over, seen, thread }
    }

    pub fn end(self) -> Vec<Tickets> {
        self.over.store(true, Ordering::SeqCst);
        self.thread.join().expect("it does not fail");
        std::mem::take(&mut *self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

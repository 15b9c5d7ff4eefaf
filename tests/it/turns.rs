//! Waiting in order on a real server: whoever asks for it is served first come, first served, whoever dies or gives up
//! meanwhile, and nobody else pays for it.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::sync::{Condvar, Mutex, mpsc};
use std::time::Duration;

use crate::support::bouncer::Bouncer;
use crate::support::leases::spawn_until_asleep;
use crate::support::worker::{self, Worker};
use crate::support::{LIMIT, NOW, Place, TTL, place, wait_until};
use syncguard::{CancelToken, ErrorCode, Heartbeat, LockOptions, PgLockClient};

fn fair() -> LockOptions {
    LockOptions::new().fair(true).timeout(LIMIT).ttl(TTL)
}

fn other(place: &Place) -> PgLockClient {
    PgLockClient::connect(&place.schema.url()).unwrap()
}

/// The longest time that a ticket is believed to last, in milliseconds.
const LONGEST: i64 = 5000;

/// Has each ticket last nearly that long, once there is a table of them: on a busy machine whoever waits may
/// renew one of two seconds too late, and lose its turn.
fn lengthen_tickets(place: &Place) {
    place.stored.run(
        "CREATE FUNCTION lengthen() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           NEW.expires_at_ms := NEW.expires_at_ms + 2900; RETURN NEW; END $$; \
         CREATE TRIGGER lengthen BEFORE INSERT ON syncguard_members FOR EACH ROW \
           WHEN (NEW.role = 'w') EXECUTE FUNCTION lengthen()",
    );
}

fn tickets(place: &Place) -> i64 {
    place.stored.one("SELECT count(*) FROM syncguard_members WHERE role = 'w'", &[]).get(0)
}

/// Until whoever comes now is younger than all who have come: time is counted in whole milliseconds, by two clocks.
fn later(place: &Place) {
    place.wait_for(place.stored.now_ms() + 20);
}

/// A row of whoever waits, as somebody else may have written it.
fn ticket(place: &Place, key: &str, id: &str, (age_ms, lasts_ms, priority): (i64, i64, i32)) {
    place.stored.run(&format!(
        "INSERT INTO syncguard_members (lock_id, key, role, since_ms, expires_at_ms, priority) \
         SELECT '{id}', '{key}', 'w', t.now - {age_ms}, t.now + {lasts_ms}, {priority} \
         FROM (SELECT {NOW} AS now) AS t"
    ));
}

#[test]
fn who_asks_for_it_is_served_in_order_by_priority_and_age() {
    let place = place();
    let key = place.key("till");
    let clients: Vec<PgLockClient> = (0..6).map(|_| other(&place)).collect();
    let guard = place.client.lock_with(&key, &fair()).unwrap();
    lengthen_tickets(&place);
    let served = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for (at, priority) in [0, 0, 5, 0, 5, -1].into_iter().enumerate() {
            let (clients, key, served) = (&clients, &key, &served);
            scope.spawn(move || {
                let options = fair().priority(priority).note(format!("waiter {at}"));
                let guard = clients[at].lock_with(key, &options).unwrap();
                served.lock().unwrap().push(at);
                let held = clients[at].operator().holders(10).unwrap();
                assert_eq!(held[0].note.as_deref(), Some(&*format!("waiter {at}")));
                guard.release().unwrap();
            });
            let all = i64::try_from(at).unwrap() + 1;
            wait_until(LIMIT, "its ticket is there", || tickets(&place) == all);
            later(&place);
        }
        let waiters = place.client.operator().waiters(10).unwrap();
        let priorities: Vec<i32> = waiters.iter().map(|waiter| waiter.priority).collect();
        assert_eq!(priorities, [5, 5, 0, 0, 0, -1]);
        assert!(waiters.iter().all(|waiter| waiter.key_hash == syncguard::hash_key(&key)));
        assert!(waiters[0].since_ms <= waiters[1].since_ms);
        assert_eq!(waiters[0].note.as_deref(), Some("waiter 2"));
        guard.release().unwrap();
    });
    assert_eq!(served.into_inner().unwrap(), [2, 4, 0, 1, 3, 5]);
    assert_eq!(tickets(&place), 0, "nobody's ticket is left");
}

#[test]
fn the_threads_of_a_process_stand_in_line_by_one_ticket() {
    let place = place();
    let key = place.key("till");
    let clients = [other(&place), other(&place)];
    let guard = place.client.lock_with(&key, &fair()).unwrap();
    lengthen_tickets(&place);
    let served = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for at in 0..12_u8 {
            let (client, key, served) = (&clients[usize::from(at % 2)], &key, &served);
            // Those behind the first of each process are seen nowhere else.
            spawn_until_asleep(scope, move || {
                let guard = client.lock_with(key, &fair()).unwrap();
                served.lock().unwrap().push(at);
                guard.release().unwrap();
            });
            let heads = i64::from(at + 1).min(2);
            wait_until(LIMIT, "its process is in line", || tickets(&place) == heads);
            later(&place);
        }
        guard.release().unwrap();
    });
    assert_eq!(served.into_inner().unwrap(), (0..12).collect::<Vec<_>>());
    assert_eq!(tickets(&place), 0);
}

#[test]
fn who_does_not_ask_pays_nothing_and_waits_for_nobody() {
    let place = place();
    let key = place.key("till");
    // Without the table, which nobody makes.
    place.client.lock(&key).unwrap().release().unwrap();
    let there: bool = place.stored.one("SELECT to_regclass('syncguard_members') IS NOT NULL", &[]).get(0);
    assert!(!there);
    place.client.lock_with(&key, &fair()).unwrap().release().unwrap();
    ticket(&place, &key, "AAAAAAAAAAAAAAAAAAAAAA", (1000, LONGEST, 9));
    assert!(place.client.try_lock_with(&key, &LockOptions::new().fair(true)).unwrap().is_none(), "it yields");
    let urgent = LockOptions::new().fair(true).priority(10);
    place.client.try_lock_with(&key, &urgent).unwrap().unwrap().release().unwrap();
    place.client.try_lock(&key).unwrap().unwrap().release().unwrap();
    assert_eq!(tickets(&place), 1);
}

#[test]
fn the_first_attempt_yields_and_a_ticket_of_nobody_s_bars_the_key_for_a_moment_only() {
    let place = place();
    let key = place.key("till");
    place.client.lock_with(&key, &fair()).unwrap().release().unwrap();
    let try_it = || place.client.try_lock_with(&key, &LockOptions::new().fair(true)).unwrap();
    for (what, times, bars) in [
        ("an older one", (1000, LONGEST, 0), true),
        ("one from the future", (-60_000, LONGEST, 0), false),
        ("one from the future with a priority", (-60_000, LONGEST, 1), true),
        ("one that is over", (1000, 0, 0), false),
        ("one that never ends", (1000, 1_000_000_000_000, 0), false),
        ("one of lower priority", (1000, LONGEST, -1), false),
    ] {
        ticket(&place, &key, "AAAAAAAAAAAAAAAAAAAAAA", times);
        let guard = try_it();
        assert_eq!(guard.is_none(), bars, "{what}");
        if let Some(guard) = guard {
            guard.release().unwrap();
        }
        place.stored.run("DELETE FROM syncguard_members");
    }
    // With a token, in two messages: the same.
    let token = CancelToken::new();
    ticket(&place, &key, "AAAAAAAAAAAAAAAAAAAAAA", (1000, LONGEST, 0));
    let with_token = LockOptions::new().fair(true).cancel(&token);
    assert!(place.client.try_lock_with(&key, &with_token).unwrap().is_none());
    // Whoever waits is served when that one is over.
    let guard = place.client.lock_with(&key, &fair()).unwrap();
    guard.release().unwrap();
    let guard = place.client.lock_with(&key, &fair().cancel(&token)).unwrap();
    guard.release().unwrap();
}

#[test]
fn who_gives_up_takes_the_ticket_back_and_the_next_one_is_served() {
    let place = place();
    let key = place.key("till");
    let (first, second) = (other(&place), other(&place));
    let guard = place.client.lock_with(&key, &fair()).unwrap();
    let token = CancelToken::new();
    std::thread::scope(|scope| {
        let one = scope.spawn(|| first.lock_with(&key, &fair().cancel(&token)).unwrap_err().code());
        wait_until(LIMIT, "the first one waits", || tickets(&place) == 1);
        let two = scope.spawn(|| second.lock_with(&key, &fair()).unwrap());
        wait_until(LIMIT, "and the second one", || tickets(&place) == 2);
        token.cancel();
        assert_eq!(one.join().unwrap(), ErrorCode::Aborted);
        wait_until(LIMIT, "its ticket is gone", || tickets(&place) == 1);
        // Enough for its first attempt, which is no contention when it is cut short.
        let brief = fair().timeout(Duration::from_secs(3));
        let error = first.lock_with(&key, &brief).unwrap_err();
        assert_eq!(error.code(), ErrorCode::AcquisitionTimeout);
        wait_until(LIMIT, "and that one, too", || tickets(&place) == 1);
        guard.release().unwrap();
        two.join().unwrap().release().unwrap();
    });
    assert_eq!(tickets(&place), 0);
}

#[test]
fn readers_let_a_writer_with_a_ticket_through() {
    let place = place();
    let key = place.key("till");
    let writer = other(&place);
    let reader = place.client.read_lock(&key).unwrap();
    std::thread::scope(|scope| {
        let written = scope.spawn(|| writer.lock_with(&key, &fair()).unwrap());
        wait_until(LIMIT, "the writer waits", || tickets(&place) == 1);
        later(&place);
        assert!(place.client.try_read_lock(&key).unwrap().is_none(), "it yields");
        reader.release().unwrap();
        written.join().unwrap().release().unwrap();
    });
    assert_eq!(tickets(&place), 0);
}

#[test]
fn a_row_of_nobody_s_bars_readers_for_a_moment_only() {
    let place = place();
    let key = place.key("till");
    let _reader = place.client.read_lock(&key).unwrap();
    for (what, times, bars) in [
        ("an older writer", (1000, LONGEST, 0), true),
        ("one that is over", (1000, 0, 0), false),
        ("one that came later", (-60_000, LONGEST, 0), false),
        ("one that says that it waits for an hour more", (1000, 3_600_000, 0), false),
        ("one that never ends", (1000, 1_000_000_000_000, 9), false),
    ] {
        ticket(&place, &key, "AAAAAAAAAAAAAAAAAAAAAA", times);
        assert_eq!(place.client.try_read_lock(&key).unwrap().is_none(), bars, "{what}");
        place.stored.run("DELETE FROM syncguard_members WHERE role = 'w'");
    }
}

#[test]
fn operators_are_shown_so_much_of_a_note() {
    let place = place();
    let key = place.key("till");
    place.client.lock_with(&key, &fair()).unwrap().release().unwrap();
    ticket(&place, &key, "AAAAAAAAAAAAAAAAAAAAAA", (1000, LONGEST, 0));
    place.stored.run("UPDATE syncguard_members SET note = repeat('é', 5000)");
    let waiters = place.client.operator().waiters(10).unwrap();
    assert_eq!(waiters[0].note.as_deref(), Some(&*"é".repeat(1024)));
}

#[test]
fn where_there_is_no_order_fair_is_refused() {
    let place = place();
    let (key, options) = (place.key("till"), LockOptions::new().fair(true));
    let slot = syncguard::Slot::number(1);
    let codes = [
        place.client.lock_all_with(&[&key, "b"], &options).err(),
        place.client.read_lock_with(&key, &options).err(),
        place.client.semaphore(&key, 2).unwrap().acquire_with(&options).err(),
        place.client.run_once(&key, slot, &options, |_| Ok::<_, ()>(())).err(),
        place.client.lock_with(&key, &LockOptions::new().priority(1)).err(),
        place.client.lock_with(&key, &options.clone().wake_ups(false)).err(),
    ];
    for error in codes {
        let error = error.unwrap();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
    }
    let heartbeat = options.heartbeat(Heartbeat::Off);
    let lead = |term: &syncguard::Term| std::ops::ControlFlow::Break(term.number());
    assert_eq!(place.client.elect(&key, &heartbeat, lead).unwrap().get(), 1);
}

/// Tickets that are live.
fn in_line(place: &Place) -> i64 {
    let sql = "SELECT count(*) FROM syncguard_members \
               WHERE role = 'w' AND expires_at_ms > extract(epoch FROM clock_timestamp()) * 1000";
    place.stored.one(sql, &[]).get(0)
}

#[test]
fn whoever_is_first_and_dies_or_sleeps_keeps_nobody_for_long_and_has_its_place_again() {
    worker::part("waiter", |parent| {
        let client = PgLockClient::connect(&parent.arg("url")).unwrap();
        let guard = client.lock_with(&parent.arg("key"), &fair().priority(1)).unwrap();
        parent.say("served");
        parent.hear();
        guard.release().unwrap();
        parent.say("released");
        parent.wait_forever();
    });
    let place = place();
    let key = place.key("till");
    let url = place.schema.url();
    let test = "turns::whoever_is_first_and_dies_or_sleeps_keeps_nobody_for_long_and_has_its_place_again";
    let start = || Worker::start(test, "waiter", &[("url", &url), ("key", &key)]);
    let guard = place.client.lock_with(&key, &fair()).unwrap();
    let mut dead = start();
    wait_until(LIMIT, "the first one waits", || in_line(&place) == 1);
    let mut asleep = start();
    wait_until(LIMIT, "and the second one", || in_line(&place) == 2);
    dead.kill();
    asleep.signal("STOP");
    guard.release().unwrap();
    let later = other(&place);
    let third = later.lock_with(&key, &fair()).unwrap();
    asleep.signal("CONT");
    wait_until(LIMIT, "it is in line again", || in_line(&place) == 1);
    std::thread::scope(|scope| {
        let last = scope.spawn(|| place.client.lock_with(&key, &fair().priority(1)).unwrap());
        wait_until(LIMIT, "and somebody who came later", || in_line(&place) == 2);
        third.release().unwrap();
        asleep.expect("served");
        assert!(!last.is_finished());
        asleep.tell("go on");
        asleep.expect("released");
        last.join().unwrap().release().unwrap();
    });
}

#[test]
fn behind_a_pooler_that_shares_sessions_the_order_is_kept() {
    let place = place();
    let key = place.key("till");
    let bouncer = Bouncer::start(&[("ignore_startup_parameters", "extra_float_digits")]);
    let clients: Vec<PgLockClient> = (0..5)
        .map(|_| PgLockClient::builder().schema(place.schema.name()).connect(&bouncer.url()).unwrap())
        .collect();
    let guard = clients[0].lock_with(&key, &fair()).unwrap();
    lengthen_tickets(&place);
    let served = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for (at, client) in clients.iter().enumerate() {
            let (key, served) = (&key, &served);
            scope.spawn(move || {
                let guard = client.lock_with(key, &fair()).unwrap();
                served.lock().unwrap().push(at);
                guard.release().unwrap();
            });
            let all = i64::try_from(at).unwrap() + 1;
            wait_until(LIMIT, "its ticket is there", || tickets(&place) == all);
            later(&place);
        }
        guard.release().unwrap();
    });
    assert_eq!(served.into_inner().unwrap(), [0, 1, 2, 3, 4]);
    assert_eq!(tickets(&place), 0);
}

#[test]
fn the_tickets_of_dead_processes_do_not_pile_up() {
    let place = place();
    let key = place.key("till");
    let guard = place.client.lock_with(&key, &fair()).unwrap();
    place.stored.run(&format!(
        "INSERT INTO syncguard_members (lock_id, key, role, since_ms, expires_at_ms) \
         SELECT lpad(n::text, 22, 'A'), '{key}', 'w', 0, 1 FROM generate_series(1, 5000) AS n"
    ));
    let waiter = other(&place);
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| waiter.lock_with(&key, &fair()).unwrap());
        wait_until(LIMIT, "whoever waits deletes a thousand each time", || tickets(&place) <= 4001);
        guard.release().unwrap();
        thread.join().unwrap().release().unwrap();
    });
    let mut left = 1;
    while left > 0 {
        left = place.client.operator().cleanup_expired(1000).unwrap();
    }
    assert_eq!(tickets(&place), 0);
}

/// How far those who come one after the other have come.
#[derive(Default)]
struct Course {
    in_line: usize,
    served: Vec<usize>,
}

/// Each is served in the order in which they came, with a few always waiting. `SYNCGUARD_HANDOVERS=10000` makes as many.
#[test]
fn the_order_is_kept_in_every_hand_over() {
    const CLIENTS: usize = 6;
    let number: usize =
        std::env::var("SYNCGUARD_HANDOVERS").map_or(300, |number| number.parse().expect("a number"));
    let place = place();
    let key = place.key("till");
    place.client.lock_with(&key, &fair()).unwrap().release().unwrap();
    lengthen_tickets(&place);
    let (course, changed) = (Mutex::new(Course::default()), Condvar::new());
    std::thread::scope(|scope| {
        let (idle, next) = mpsc::channel();
        let mut starts = Vec::new();
        for at in 0..CLIENTS {
            let (start, started) = mpsc::channel::<usize>();
            starts.push(start);
            idle.send(at).unwrap();
            let (idle, key, course, changed, client) = (idle.clone(), &key, &course, &changed, other(&place));
            scope.spawn(move || {
                for n in started {
                    let guard = client.lock_with(key, &fair()).unwrap();
                    let mut state = course.lock().unwrap();
                    state.served.push(n);
                    changed.notify_all();
                    let few = |state: &mut Course| state.in_line < number.min(state.served.len() + 3);
                    let (state, late) = changed.wait_timeout_while(state, LIMIT, few).unwrap();
                    drop(state);
                    assert!(!late.timed_out(), "nobody comes");
                    guard.release().unwrap();
                    let _ = idle.send(at);
                }
            });
        }
        let mut newest: i64 = 0;
        for n in 0..number {
            starts[next.recv().unwrap()].send(n).unwrap();
            wait_until(LIMIT, "it is in line, or was served", || {
                let sql = "SELECT COALESCE(max(since_ms), 0) FROM syncguard_members WHERE role = 'w'";
                let since: i64 = place.stored.one(sql, &[]).get(0);
                let is_new = since > newest && place.stored.now_ms() > since;
                if is_new {
                    newest = since;
                }
                is_new || course.lock().unwrap().served.contains(&n)
            });
            course.lock().unwrap().in_line = n + 1;
            changed.notify_all();
        }
        drop(starts);
    });
    let served = course.into_inner().unwrap().served;
    let kept = served.iter().enumerate().filter(|(at, n)| at == *n).count();
    println!("{kept} of {number} handovers were in order");
    assert_eq!(kept, number);
}

// ---- what waiters leave behind

/// As `CREATE INDEX` does: whoever writes the table of members waits.
const SHARE: &str = "BEGIN; LOCK TABLE syncguard_members IN SHARE MODE";

#[test]
fn tickets_that_cannot_be_withdrawn_lose_no_lease() {
    let place = place();
    let keys: Vec<String> = (0..40).map(|n| place.key(&format!("k{n}"))).collect();
    let holder = other(&place);
    let _held: Vec<_> = keys.iter().map(|key| holder.lock_with(key, &fair()).unwrap()).collect();
    let short = LockOptions::new().ttl(Duration::from_secs(9));
    let mine = place.client.lock_with(&place.key("mine"), &short).unwrap();
    let token = CancelToken::new();
    let mut blocker = place.schema.client();
    std::thread::scope(|scope| {
        for key in &keys {
            let (client, options) = (&place.client, fair().cancel(&token));
            scope.spawn(move || client.lock_with(key, &options).map(drop).unwrap_err());
        }
        wait_until(LIMIT, "all wait", || tickets(&place) == 40);
        blocker.batch_execute(SHARE).unwrap();
        token.cancel();
    });
    // Forty withdrawals of half a second each would take longer.
    let begun = place.stored.now_ms();
    wait_until(LIMIT, "its first ttl is over", || place.stored.now_ms() > begun + 11_000);
    assert!(mine.is_held(), "{:?}", mine.lost_reason());
}

#[test]
fn a_wait_without_pauses_has_a_ticket_and_announces_a_writer() {
    let place = place();
    let (till, prices) = (place.key("till"), place.key("prices"));
    let _guard = place.client.lock_with(&till, &fair()).unwrap();
    let _reader = place.client.read_lock(&prices).unwrap();
    for (key, options) in [(&till, fair()), (&prices, LockOptions::new().timeout(LIMIT))] {
        let (client, token) = (other(&place), CancelToken::new());
        let options = options.retry_delay(Duration::ZERO).cancel(&token);
        std::thread::scope(|scope| {
            scope.spawn(|| client.lock_with(key, &options).map(drop).unwrap_err());
            wait_until(LIMIT, "it says that it waits", || tickets(&place) == 1);
            token.cancel();
        });
        wait_until(LIMIT, "it takes that back", || tickets(&place) == 0);
    }
}

#[test]
fn a_writer_that_gave_up_lets_readers_in_whatever_its_pauses() {
    let place = place();
    let (key, free) = (place.key("a"), place.key("b"));
    let _reader = place.client.read_lock(&key).unwrap();
    let options = LockOptions::new().wake_ups(false).retry_delay(Duration::from_secs(3600));
    let options = options.timeout(Duration::from_secs(1));
    other(&place).lock_all_with(&[&key, &free], &options).map(drop).unwrap_err();
    wait_until(LIMIT, "another reader joins", || place.client.try_read_lock(&key).unwrap().is_some());
}

#[test]
fn the_question_who_has_the_key_costs_nobody_the_key() {
    let place = place();
    let key = place.key("a");
    drop(place.client.read_lock(&place.key("b")).unwrap());
    let guard = place.client.lock(&key).unwrap();
    let plain = other(&place);
    let mut blocker = place.schema.client();
    blocker.batch_execute("BEGIN; LOCK TABLE syncguard_members").unwrap();
    let options = LockOptions::new().timeout(Duration::from_secs(8));
    std::thread::scope(|scope| {
        let wait = scope.spawn(|| plain.lock_with(&key, &options).map(drop));
        let asks =
            "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'syncguard_members'::regclass";
        wait_until(LIMIT, "it asks", || place.stored.one(asks, &[]).get::<_, i64>(0) > 0);
        guard.release().unwrap();
        wait.join().unwrap().unwrap();
    });
}

/// Each lock table has members of its own, also the one whose name would lead to another's.
#[test]
fn a_lock_table_whose_members_would_be_the_defaults_ends_nobodys_readers() {
    let place = place();
    let url = place.schema.url();
    let [a, b] = [(); 2].map(|()| other(&place));
    let named = PgLockClient::builder().table_name("syncguard").connect(&url).unwrap();
    let key = place.key("till");
    let reader = a.read_lock(&key).unwrap();
    drop(named.lock_with(&key, &LockOptions::new().note("x")).unwrap());
    b.read_lock(&key).unwrap().release().unwrap();
    assert!(b.try_lock(&key).unwrap().is_none() && reader.is_held(), "a writer beside a reader");
}

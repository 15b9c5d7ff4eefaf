//! Rows of others that differ in one thing: by what a place in line is counted, and what a grant in turn does to tickets.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::time::Duration;

use syncguard::backend::{Attempt, Clock, Intent, Label, TurnAttempt};
use syncguard::{CancelToken, LockBackend, Result};

use crate::support::calls::ms;
use crate::support::{Call, LIMIT, Place, TTL, id, place, unique};

/// What tickets last here, just less than they may.
const LASTS_MS: i64 = 4_500;

/// A row of the table of members.
#[derive(Clone)]
struct Row {
    id: String,
    key: String,
    role: char,
    since_ms: i64,
    lasts_ms: i64,
    priority: i32,
}

impl Row {
    fn write(&self, place: &Place, now_ms: i64) {
        let sql = "INSERT INTO syncguard_members (lock_id, key, role, since_ms, expires_at_ms, priority) \
                   VALUES ($1, $2, $3, $4, $5, $6)";
        let role = self.role.to_string();
        let row: [&(dyn postgres::types::ToSql + Sync); 6] =
            [&self.id, &self.key, &role, &self.since_ms, &(now_ms + self.lasts_ms), &self.priority];
        place.stored.client().execute(sql, &row).unwrap();
    }
}

/// All that is stored of members and of whoever waits.
fn rows(place: &Place, condition: &str) -> Vec<String> {
    let sql = format!("SELECT m::text FROM syncguard_members AS m WHERE {condition} ORDER BY lock_id");
    place.stored.client().query(&sql, &[]).unwrap().iter().map(|row| row.get(0)).collect()
}

/// The ways to ask for a turn, each of which has a statement of its own.
#[derive(Clone, Copy, Debug)]
struct Form {
    /// With a token: what is ahead is counted in one message, and the grant is another.
    in_two: bool,
    /// A row that is over stands for the key: the careful statement decides.
    over: bool,
    /// The holder says something of itself.
    labelled: bool,
}

const FORMS: [Form; 6] = {
    const fn form(in_two: bool, over: bool, labelled: bool) -> Form {
        Form { in_two, over, labelled }
    }
    [
        form(false, false, false),
        form(false, true, false),
        form(true, false, false),
        form(true, true, false),
        form(false, false, true),
        form(false, true, true),
    ]
};

impl Form {
    fn label(self) -> Label<'static> {
        if self.labelled { Label::new(Some("me"), None) } else { Label::default() }
    }

    /// One attempt, with the key as free as this form has it.
    fn ask(self, place: &Place, key: &str, lock_id: &str, turn: (Intent<'_>, Option<Intent<'_>>)) -> bool {
        if self.over {
            place.stored.write(key, &id("over"), -5_000, 3);
        }
        self.attempt(place, key, lock_id, turn).unwrap()
    }

    fn attempt(
        self,
        place: &Place,
        key: &str,
        lock_id: &str,
        (ticket, next): (Intent<'_>, Option<Intent<'_>>),
    ) -> Result<bool> {
        let attempt = Attempt::new(key, lock_id, TTL, Clock::system().now().after(LIMIT));
        let attempt = TurnAttempt::new(attempt.with_label(self.label()), ticket, next);
        let token = if self.in_two { CancelToken::new() } else { CancelToken::never() };
        Ok(place.client.grant_in_turn(&attempt, &token)?.is_some())
    }
}

/// Makes the tables.
fn ready(place: &Place) {
    let (key, other) = (place.key("warm"), id("warm"));
    assert!(FORMS[0].ask(place, &key, &other, (Intent::new(&key, &other, ms(0), ms(0)), None)));
    place.stored.run("DELETE FROM syncguard_locks");
}

/// Who is ahead of the ticket `m`, which has waited since a moment and has no priority: its own row, another's, and how many.
fn lines(key: &str, moment: i64) -> Vec<(&'static str, Row, Option<Row>, u64)> {
    let row = |name: &str, since_ms: i64| Row {
        id: id(name),
        key: key.to_owned(),
        role: 'w',
        since_ms,
        lasts_ms: LASTS_MS,
        priority: 0,
    };
    let own = row("m", moment);
    let older = row("z", moment - 1);
    let elsewhere = |row: &Row| Row { key: format!("{key}-other"), ..row.clone() };
    let other = |what, row, ahead| (what, own.clone(), Some(row), ahead);
    vec![
        ("nobody else", own.clone(), None, 0),
        other("an older one", older.clone(), 1),
        other("a younger one with the smaller id", row("a", moment + 1), 0),
        other("one of the same age with the smaller id", row("a", moment), 1),
        other("one of the same age with the greater id", row("z", moment), 0),
        other("an older one for another key", elsewhere(&older), 0),
        other("an older reader", Row { role: 's', ..older.clone() }, 0),
        other("an older note", Row { role: 'n', ..older.clone() }, 0),
        other("an older one that is over", Row { lasts_ms: 0, ..older.clone() }, 0),
        other("an older one that lasts for too long", Row { lasts_ms: 3_600_000, ..older.clone() }, 0),
        other("an older one of lower priority", Row { priority: -1, ..older.clone() }, 0),
        other("a younger one of higher priority", Row { priority: 1, ..row("z", moment + 1) }, 1),
        // Its own row says for how long it has waited, if it is its own.
        ("its own has a higher priority", Row { priority: 5, ..own.clone() }, None, 0),
        ("its own is for another key", elsewhere(&row("m", moment - 9)), Some(older.clone()), 1),
        ("its own is a reader", Row { role: 's', ..row("m", moment - 9) }, Some(older), 1),
    ]
}

/// The same question until it was asked while the tickets were live.
fn asked<T>(place: &Place, rows: &[&Row], mut ask: impl FnMut() -> T) -> T {
    loop {
        place.stored.run("DELETE FROM syncguard_members; DELETE FROM syncguard_locks");
        let now_ms = place.stored.now_ms();
        rows.iter().for_each(|row| row.write(place, now_ms));
        let answer = ask();
        if place.stored.now_ms() < now_ms + LASTS_MS {
            return answer;
        }
    }
}

#[test]
fn a_look_counts_the_live_tickets_of_the_key_that_come_before_its_own() {
    let place = place();
    ready(&place);
    let key = place.key("till");
    for (what, own, other, ahead) in lines(&key, place.stored.now_ms() - 60_000) {
        let rows: Vec<&Row> = std::iter::once(&own).chain(&other).collect();
        let ticket = Intent::new(&key, &own.id, ms(0), ms(4_000));
        let deadline = Clock::system().now().after(LIMIT);
        let found = asked(&place, &rows, || {
            place.stored.write(&place.key("other"), &id("held"), 30_000, 3);
            place.client.turn(&ticket, deadline, &CancelToken::never()).unwrap()
        });
        assert_eq!((found.ahead, found.holder.is_none()), (ahead, true), "{what}");
    }
}

#[test]
fn every_form_of_a_grant_in_turn_yields_to_the_same_tickets() {
    let place = place();
    ready(&place);
    let key = place.key("till");
    for form in FORMS {
        for (what, own, other, ahead) in lines(&key, place.stored.now_ms() - 60_000) {
            let rows: Vec<&Row> = std::iter::once(&own).chain(&other).collect();
            let ticket = Intent::new(&key, &own.id, ms(0), ms(4_000));
            let granted = asked(&place, &rows, || form.ask(&place, &key, &id("lease"), (ticket, None)));
            assert_eq!(granted, ahead == 0, "{what}, {form:?}");
        }
    }
}

/// An older ticket, and an attempt under an id that a row has already.
#[test]
fn an_id_that_stands_for_the_key_yields_to_nobody_and_one_that_stands_for_another_key_does() {
    let place = place();
    ready(&place);
    let key = place.key("till");
    let older = |now_ms: i64| Row {
        id: id("a"),
        key: key.clone(),
        role: 'w',
        since_ms: now_ms - 60_000,
        lasts_ms: LASTS_MS,
        priority: 0,
    };
    let older = older(place.stored.now_ms());
    let ticket = Intent::new(&key, "mAAAAAAAAAAAAAAAAAAAAA", ms(0), ms(4_000));
    for form in FORMS {
        for (what, stands_for, ends_in_ms, granted) in [
            ("its own row lives", &key, 30_000, true),
            ("its own row is over", &key, -5_000, true),
            ("its id is another key's", &place.key("other"), 30_000, false),
        ] {
            if form.over && *stands_for == key {
                continue;
            }
            let answer = asked(&place, &[&older], || {
                place.stored.write(stands_for, &id("lease"), ends_in_ms, 3);
                form.ask(&place, &key, &id("lease"), (ticket, None))
            });
            assert_eq!(answer, granted, "{what}, {form:?}");
            let fence = place.stored.row(stands_for).unwrap().fence;
            let is_new = *stands_for == key && ends_in_ms < 0;
            assert_eq!(fence, if is_new { "000000000000004" } else { "000000000000003" }, "{what}, {form:?}");
        }
    }
}

/// `next` as a row, and what stands under its id before.
#[test]
fn a_grant_ends_its_own_ticket_and_begins_the_next_one_and_changes_nobody_elses_row() {
    let place = place();
    ready(&place);
    let (key, elsewhere) = (place.key("till"), place.key("other"));
    let (own, next) = (id("m"), id("next"));
    let row = |id: &str, key: &str, role| Row {
        id: id.to_owned(),
        key: key.to_owned(),
        role,
        since_ms: 1_000,
        lasts_ms: LASTS_MS,
        priority: -7,
    };
    let others = [row(&id("x"), &key, 'w'), row(&id("y"), &elsewhere, 's'), row(&id("z"), &elsewhere, 'n')];
    for form in FORMS {
        for (own_role, next_row, begins) in [
            ('w', None, true),
            ('w', Some(row(&next, &key, 'w')), true),
            ('w', Some(row(&next, &elsewhere, 'w')), false),
            ('w', Some(row(&next, &key, 's')), false),
            ('w', Some(row(&next, &elsewhere, 'n')), false),
            ('s', None, true),
            ('n', None, true),
        ] {
            // A grant that is noted takes away what readers of the key have left.
            if form.labelled && next_row.as_ref().is_some_and(|row| row.key == key && row.role == 's') {
                continue;
            }
            let what = format!("{own_role}, {:?}, {form:?}", next_row.as_ref().map(|row| row.role));
            place.stored.run("DELETE FROM syncguard_members; DELETE FROM syncguard_locks");
            let now_ms = place.stored.now_ms();
            let own_row = row(&own, if own_role == 'w' { &key } else { &elsewhere }, own_role);
            others.iter().chain([&own_row]).chain(&next_row).for_each(|row| row.write(&place, now_ms));
            let unchanged = format!("lock_id NOT IN ('{own}', '{next}', '{}')", id("lease"));
            let before = rows(&place, &unchanged);
            let (of_own, of_next) = (format!("lock_id = '{own}'"), format!("lock_id = '{next}'"));
            let (mine, theirs) = (rows(&place, &of_own), rows(&place, &of_next));
            let (intent, note) = (Intent::new(&key, &own, ms(0), ms(4_000)), Some("for the rest"));
            let begun = Intent::new(&key, &next, ms(2_000), ms(4_000)).with_priority(3, note);
            let turn = (intent.with_priority(9, None), Some(begun));
            assert!(form.ask(&place, &key, &id("lease"), turn), "{what}");
            assert_eq!(rows(&place, &unchanged), before, "{what}");
            assert_eq!(rows(&place, &of_own), if own_role == 'w' { vec![] } else { mine }, "{what}");
            if begins {
                let as_asked = format!(
                    "{of_next} AND key = '{key}' AND role = 'w' AND priority = 3 AND note = 'for the rest'"
                );
                assert_eq!(rows(&place, &as_asked).len(), 1, "{what}: {:?}", rows(&place, &of_next));
            } else {
                assert_eq!(rows(&place, &of_next), theirs, "{what}");
            }
        }
    }
}

/// An announcement clears away what whoever waited for the key has left, and touches nothing else.
#[test]
fn a_ticket_changes_nobody_elses_row_and_lives_though_it_was_long_over() {
    let place = place();
    ready(&place);
    let (key, own) = (place.key("till"), id("m"));
    let dead = |name: &str, key: &str, role| Row {
        id: id(name),
        key: key.to_owned(),
        role,
        since_ms: 1_000,
        lasts_ms: -3_600_000,
        priority: 0,
    };
    let announce = |id: &str| {
        let intent = Intent::new(&key, id, ms(0), ms(4_000));
        place.client.announce(&intent, Clock::system().now().after(LIMIT))
    };
    let live = |id: &str| {
        let now = place.stored.now_ms();
        let sql = format!(
            "lock_id = '{id}' AND role = 'w' AND note IS NULL AND expires_at_ms > {}",
            now - 3_000_000
        );
        rows(&place, &sql).len()
    };
    // A note stays as it was written, though its lease is renewed.
    let others = [dead("n", &key, 'n'), dead("s", &key, 's'), dead("x", &place.key("other"), 'w')];
    place.stored.run("DELETE FROM syncguard_members");
    let now_ms = place.stored.now_ms();
    others
        .iter()
        .chain([&dead("m", &key, 'w'), &dead("w", &key, 'w')])
        .for_each(|row| row.write(&place, now_ms));
    let of_others = format!("lock_id NOT IN ('{own}', '{}')", id("w"));
    let before = rows(&place, &of_others);
    announce(&own).unwrap();
    assert_eq!(live(&own), 1, "its own, though it was over");
    assert_eq!(rows(&place, &format!("lock_id = '{}'", id("w"))), Vec::<String>::new(), "left behind");
    assert_eq!(rows(&place, &of_others), before);
    place.client.withdraw(&own, Clock::system().now().after(LIMIT)).unwrap();
    assert_eq!((live(&own), rows(&place, &of_others)), (0, before.clone()), "it takes its own back");
    // An id that is somebody else's already.
    for other in [dead("s", &key, 's'), dead("n", &key, 'n'), dead("x", &place.key("other"), 'w')] {
        let _ = announce(&other.id);
        if other.role != 'w' {
            let _ = place.client.withdraw(&other.id, Clock::system().now().after(LIMIT));
        }
        assert_eq!(rows(&place, &of_others), before, "{}", other.role);
    }
}

#[test]
fn without_a_grant_no_ticket_ends_or_begins_and_without_a_next_one_none_begins() {
    let place = place();
    ready(&place);
    let key = place.key("till");
    let ticket = Intent::new(&key, "mAAAAAAAAAAAAAAAAAAAAA", ms(0), ms(4_000));
    let own = Row {
        id: ticket.id.to_owned(),
        key: key.clone(),
        role: 'w',
        since_ms: 1_000,
        lasts_ms: LASTS_MS,
        priority: 0,
    };
    let silent = Intent::new(&key, "nAAAAAAAAAAAAAAAAAAAAA", ms(0), ms(4_000));
    let tickets = |place: &Place| -> Vec<(String, Option<String>)> {
        let sql = "SELECT lock_id, note FROM syncguard_members WHERE role = 'w' ORDER BY lock_id";
        let rows = place.stored.client().query(sql, &[]).unwrap();
        rows.iter().map(|row| (row.get(0), row.get(1))).collect()
    };
    for form in FORMS {
        place.stored.run("DELETE FROM syncguard_members; DELETE FROM syncguard_locks");
        own.write(&place, place.stored.now_ms());
        place.stored.write(&key, &id("held"), 30_000, 3);
        assert!(!form.attempt(&place, &key, &id("lease"), (ticket, Some(silent))).unwrap(), "{form:?}");
        assert_eq!(tickets(&place), [(own.id.clone(), None)], "{form:?}");
        place.stored.remove(&key);
        assert!(form.ask(&place, &key, &id("lease"), (ticket, None)), "{form:?}");
        assert_eq!(tickets(&place), [], "{form:?}");
        place.stored.remove(&key);
        assert!(form.ask(&place, &key, &id("other"), (ticket, Some(silent))), "{form:?}");
        assert_eq!(tickets(&place), [(silent.id.to_owned(), None)], "{form:?}");
    }
}

/// What is said of a grant in turn, in its own words or not at all.
#[test]
fn a_grant_in_turn_says_what_its_holder_said_and_takes_away_what_earlier_ones_of_the_key_left() {
    let place = place();
    ready(&place);
    let key = place.key("till");
    let earlier = |id: &str, key: &str, role| Row {
        id: id.to_owned(),
        key: key.to_owned(),
        role,
        since_ms: 1_000,
        lasts_ms: LASTS_MS,
        priority: 0,
    };
    for over in [false, true] {
        for (owner, note) in [(Some("me"), None), (None, Some("why")), (Some("me"), Some("why"))] {
            place.stored.run("DELETE FROM syncguard_members; DELETE FROM syncguard_locks");
            let now_ms = place.stored.now_ms();
            earlier(&id("earlier"), &key, 'n').write(&place, now_ms);
            earlier(&id("reader"), &key, 's').write(&place, now_ms);
            earlier(&id("waits"), &key, 'w').write(&place, now_ms - 60_000);
            earlier(&id("other"), &place.key("other"), 'n').write(&place, now_ms);
            if over {
                place.stored.write(&key, &id("over"), -5_000, 3);
            }
            let lock_id = id("lease");
            let attempt = Attempt::new(&key, &lock_id, TTL, Clock::system().now().after(LIMIT));
            let ticket = Intent::new(&key, "mAAAAAAAAAAAAAAAAAAAAA", ms(0), ms(4_000));
            let attempt = TurnAttempt::new(attempt.with_label(Label::new(owner, note)), ticket, None);
            let granted = place.client.grant_in_turn(&attempt, &CancelToken::never()).unwrap();
            let fence = granted.expect("it is free").acquired.fence.to_string();
            let sql = "SELECT owner, note, role, fence FROM syncguard_members WHERE lock_id = $1";
            let row = place.stored.one(sql, &[&lock_id]);
            let said: (Option<String>, Option<String>) = (row.get(0), row.get(1));
            assert_eq!(said, (owner.map(str::to_owned), note.map(str::to_owned)), "{over}");
            assert_eq!((row.get::<_, &str>(2), row.get::<_, &str>(3)), ("n", &*fence), "{over}");
            let sql = "SELECT lock_id FROM syncguard_members WHERE lock_id <> $1 ORDER BY lock_id";
            let left = place.stored.client().query(sql, &[&lock_id]).unwrap();
            let left: Vec<String> = left.iter().map(|row| row.get(0)).collect();
            assert_eq!(left, [id("other"), id("waits")], "{over}");
        }
    }
}

#[test]
fn a_grant_in_turn_passes_over_what_somebody_else_deletes() {
    for over in [false, true] {
        let place = place();
        ready(&place);
        let key = place.key("till");
        Row { id: id("earlier"), key: key.clone(), role: 'n', since_ms: 1, lasts_ms: 1, priority: 0 }
            .write(&place, 1);
        if over {
            place.stored.write(&key, &id("over"), -5_000, 3);
        }
        let mut busy = place.schema.client();
        busy.batch_execute("BEGIN; SELECT FROM syncguard_members FOR UPDATE").unwrap();
        let name = unique();
        let client = place.named(&name);
        let call = Call::start(&name, move || {
            let lock_id = id("lease");
            let attempt = Attempt::new(&key, &lock_id, TTL, Clock::system().now().after(LIMIT));
            let ticket = Intent::new(&key, "mAAAAAAAAAAAAAAAAAAAAA", ms(0), Duration::from_secs(4));
            let attempt = TurnAttempt::new(attempt.with_label(Label::new(Some("me"), None)), ticket, None);
            client.grant_in_turn(&attempt, &CancelToken::never()).unwrap().is_some()
        });
        assert!(!call.settle(&place.stored), "it waits");
        assert!(call.join());
        busy.batch_execute("ROLLBACK").unwrap();
    }
}

//! One message and two decide alike.

use super::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Row {
    Absent,
    Live { mine: bool },
    InTolerance { mine: bool },
    Dead { mine: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    Nothing,
    Counter,
    Row,
}

const ROWS: [Row; 7] = [
    Row::Absent,
    Row::Live { mine: true },
    Row::Live { mine: false },
    Row::InTolerance { mine: true },
    Row::InTolerance { mine: false },
    Row::Dead { mine: true },
    Row::Dead { mine: false },
];

const COUNTERS: [Option<i64>; 4] = [None, Some(7), Some(900_000_000_000_000), Some(1_000_000_000_000_000)];

#[derive(Clone, Copy, Debug)]
struct State {
    row: Row,
    counter: Option<i64>,
    held: Held,
}

/// What a call answered and what it left behind, without the times.
#[derive(Debug, PartialEq, Eq)]
struct Effect {
    waited: bool,
    answer: Result<String, (ErrorCode, bool)>,
    counter: Option<i64>,
    row: Option<(String, String, &'static str)>,
}

fn set(stored: &Stored, key: &str, row: Row, counter: Option<i64>) {
    let (mine, theirs) = (id("mine"), id("theirs"));
    let pick = |is_mine: bool| if is_mine { &mine } else { &theirs };
    stored.run("DELETE FROM syncguard_locks");
    match row {
        Row::Absent => {}
        Row::Live { mine } => stored.write(key, pick(mine), 30_000, 7),
        Row::InTolerance { mine } => stored.write(key, pick(mine), -1, 7),
        Row::Dead { mine } => stored.write(key, pick(mine), -1_001, 7),
    }
    match counter {
        Some(counter) => stored.set_counter(key, counter),
        None => stored.run(&format!("DELETE FROM syncguard_fence_counters WHERE fence_key = 'fence:{key}'")),
    }
}

fn effect(
    place: &Place,
    (client, name): (&PgLockClient, &str),
    kind: Kind,
    State { row, counter, held }: State,
    two: bool,
) -> Effect {
    let key = place.key("key");
    let key = key.as_str();
    loop {
        set(&place.stored, key, row, counter);
        let mut holder = match held {
            Held::Nothing => None,
            Held::Counter => {
                let sql = "SELECT FROM syncguard_fence_counters FOR SHARE";
                Some(transaction(place, sql))
            }
            Held::Row => Some(transaction(place, "SELECT FROM syncguard_locks FOR UPDATE")),
        };
        let call = {
            let (client, key) = (client.clone(), key.to_owned());
            Call::start(name, move || answer(&client, kind, &key, &token(two)))
        };
        let waited = call.settle(&place.stored);
        if let Some(holder) = &mut holder {
            holder.batch_execute("ROLLBACK").unwrap();
        }
        let answer = call.join();
        let written = place.stored.row(key).map_or(i64::MAX, |row| row.acquired_at_ms);
        if matches!(row, Row::InTolerance { .. }) && place.stored.now_ms() > written.saturating_add(900) {
            continue; // too slow: by now the row may have been dead
        }
        return Effect {
            waited,
            answer: answer.map_err(|error| (error.code(), error.is_outcome_unknown())),
            counter: place.stored.counter(key),
            row: place.stored.row(key).map(|row| {
                let renewed = row.expires_at_ms > row.acquired_at_ms + 20_000;
                (row.lock_id, row.fence, if renewed { "30 s" } else { "as it was" })
            }),
        };
    }
}

fn answer(client: &PgLockClient, kind: Kind, key: &str, token: &CancelToken) -> Result<String> {
    let mine = id("mine");
    match kind {
        Kind::Acquire => {
            let deadline = Clock::system().now().after(LIMIT);
            let attempt = Attempt::new(key, &mine, TTL, deadline);
            client.attempt(&attempt, token).map(|answer| format!("{:?}", answer.fence()))
        }
        Kind::Extend => LockBackend::extend(client, &mine, TTL, token).map(|answer| match answer {
            ExtendOutcome::Extended { .. } => "extended".into(),
            refused => format!("{refused:?}"),
        }),
        Kind::Release => LockBackend::release(client, &mine, token).map(|answer| format!("{answer:?}")),
    }
}

#[test]
fn one_message_and_two_do_the_same_in_every_state_of_the_rows() {
    crate::support::together(ROWS.len(), |n| {
        let row = ROWS[n];
        let place = place();
        let name = unique();
        let client = place.build(&name, PgLockClient::builder().operation_timeout(LIMIT));
        for counter in COUNTERS {
            for held in [Held::Nothing, Held::Counter, Held::Row] {
                if (held == Held::Counter && counter.is_none())
                    || (held == Held::Row && (row == Row::Absent || counter != Some(7)))
                {
                    continue;
                }
                for kind in [Kind::Acquire, Kind::Extend, Kind::Release] {
                    let state = State { row, counter, held };
                    let [one, two] = FORMS.map(|two| effect(&place, (&client, &name), kind, state, two));
                    assert_eq!(one, two, "{kind:?} with {state:?}");
                    expect(kind, state, &one);
                }
            }
        }
    });
}

/// What both must do, where it is plain.
fn expect(kind: Kind, State { row, counter, held }: State, effect: &Effect) {
    let what = format!("{kind:?} with {row:?}, {counter:?}, {held:?} held: {effect:?}");
    let free = matches!(row, Row::Absent | Row::Dead { .. });
    let mine = matches!(row, Row::Live { mine: true } | Row::InTolerance { mine: true });
    let full = counter.is_some_and(|counter| counter >= 900_000_000_000_000);
    let has_my_id = mine || row == Row::Dead { mine: true };
    let may_wait = if kind == Kind::Acquire { free || mine } else { has_my_id };
    assert_eq!(effect.waited, held == Held::Row && may_wait, "only for a row that matters: {what}");
    match kind {
        Kind::Acquire if free && held == Held::Counter => {
            assert_eq!(effect.answer, Ok("None".into()), "{what}");
        }
        Kind::Acquire if free && full => {
            assert_eq!(effect.answer, Err((ErrorCode::Internal, false)), "{what}");
        }
        Kind::Acquire if free => {
            assert_eq!(effect.counter, Some(counter.unwrap_or(0) + 1), "{what}");
            assert_eq!(effect.row.as_ref().unwrap().0, id("mine"), "{what}");
            return;
        }
        Kind::Acquire => assert_eq!(effect.answer.as_deref() == Ok("None"), !mine, "{what}"),
        Kind::Extend => assert_eq!(effect.answer.as_deref() == Ok("extended"), mine, "{what}"),
        Kind::Release => assert_eq!(effect.row.is_none(), mine || row == Row::Absent, "{what}"),
    }
    assert_eq!(effect.counter, counter, "{what}");
}

//! Single operations beside one statement of the same driver; messages and allocations, counted.

use std::time::{Duration, Instant};

use postgres::{Client, NoTls};
use stats_alloc::Region;
use syncguard::{AdvisoryKey, AdvisoryOptions, CancelToken, ExtendResult, Lookup, PgLockClient};

use crate::floor::Floor;
use crate::line::Line;
use crate::pairs::{Pair, time};
use crate::report::Goal::{self, AtLeast, AtMost};
use crate::report::quantile;
use crate::{Stage, TTL, cpu};

const N: usize = 200;

pub(crate) fn run(stage: &Stage) {
    cpu::on_one(stage.server.pid().unwrap(), || {
        operations(stage);
        advisory(stage);
        tries(stage);
    });
    round_trips(stage);
    after_a_fenced_transaction(stage);
    allocations(stage);
}

fn operations(stage: &Stage) {
    let url = stage.schema.socket_url();
    let client = PgLockClient::connect(&url).unwrap();
    let mut floor = Floor::new(&url);
    let held = client.acquire("held", TTL).unwrap().acquired().unwrap();
    floor.upsert("held");
    let id = held.lock_id.clone();
    let mut row = |figure: &str, floor_op: &mut dyn FnMut(&mut Floor), ours: &mut dyn FnMut()| {
        let pair = Pair::run(
            stage.blocks,
            || time(|| (0..N).for_each(|_| floor_op(&mut floor))),
            || time(|| (0..N).for_each(|_| ours())),
        );
        stage.report.row(figure, pair.speed(), Goal::None, &pair.note(N, ["floor", "ours"]));
    };
    row("extend / one durable prepared update", &mut |f| f.update("held"), &mut || {
        assert!(matches!(client.extend(&id, TTL).unwrap(), ExtendResult::Extended { .. }));
    });
    row("is_locked / one prepared select", &mut |f| f.select("held"), &mut || {
        assert!(client.is_locked("held").unwrap());
    });
    row("lookup by key / one prepared select", &mut |f| f.select("held"), &mut || {
        assert!(client.lookup(Lookup::Key("held")).unwrap().is_some());
    });
    row("acquire of a key that is held / one prepared select", &mut |f| f.select("held"), &mut || {
        assert!(client.acquire("held", TTL).unwrap().acquired().is_none());
    });
    client.release(&id).unwrap();
}

/// Session locks beside the bare functions on one connection.
fn advisory(stage: &Stage) {
    let url = stage.schema.socket_url();
    let client = PgLockClient::connect(&url).unwrap();
    let key = AdvisoryKey::from_text("bench");
    let mut bare = Client::connect(&url, NoTls).unwrap();
    let take = bare.prepare("SELECT pg_try_advisory_lock($1)").unwrap();
    let give = bare.prepare("SELECT pg_advisory_unlock($1)").unwrap();
    let number = key.as_i64();
    let pair = Pair::run(
        stage.blocks,
        || {
            time(|| {
                for _ in 0..N {
                    bare.query(&take, &[&number]).unwrap();
                    bare.query(&give, &[&number]).unwrap();
                }
            })
        },
        || {
            time(|| {
                for _ in 0..N {
                    client.try_advisory_lock(&key).unwrap().unwrap().release().unwrap();
                }
            })
        },
    );
    let figure = "session lock: try + release / the bare functions";
    stage.report.row(figure, pair.speed(), AtLeast(0.9), &pair.note(N, ["bare", "ours"]));
}

/// Ten thousand tries each of a session lock that is free and of one that is held, one by one; and what
/// the server needs for them without anything around.
fn tries(stage: &Stage) {
    const TRIES: usize = 10_000;
    let url = stage.schema.socket_url();
    let (client, holder) = (PgLockClient::connect(&url).unwrap(), PgLockClient::connect(&url).unwrap());
    let mut bare = Client::connect(&url, NoTls).unwrap();
    let hour = AdvisoryOptions::new().max_hold(Duration::from_secs(3600));
    let held = AdvisoryKey::from_text("held");
    let guard = holder.try_advisory_lock_with(&held, &hour).unwrap().unwrap();
    for (state, key) in [("free", AdvisoryKey::from_text("free")), ("held", held)] {
        let mut times = Vec::with_capacity(TRIES);
        for _ in 0..TRIES {
            let start = Instant::now();
            let found = client.try_advisory_lock(&key).unwrap();
            times.push(start.elapsed().as_secs_f64() * 1e3);
            assert_eq!(found.is_some(), state == "free");
        }
        let p99 = quantile(&times, 0.99);
        let figure = format!("session lock: a try of a key that is {state}, in ms");
        stage.report.row(&figure, times, Goal::None, &format!("{TRIES} tries, p50; p99 {p99:.3} ms"));
        // The target list comes last: the time is read before and after the tries.
        let sql = format!(
            "SELECT (EXTRACT(EPOCH FROM clock_timestamp() - s.at) * 1e6 / {TRIES})::float8 \
             FROM (SELECT clock_timestamp() AS at OFFSET 0) AS s, \
               LATERAL (SELECT count(pg_try_advisory_lock($1)) FROM generate_series(1, {TRIES}) WHERE s.at > '-infinity') AS t"
        );
        let in_server: f64 = bare.query_one(&sql, &[&key.as_i64()]).unwrap().get(0);
        bare.execute("SELECT pg_advisory_unlock_all()", &[]).unwrap();
        stage.report.count("… in the server, in µs", in_server, AtMost(1000.0), "without message and answer");
    }
    drop(guard);
}

/// Messages to the server per operation, counted on the line.
fn round_trips(stage: &Stage) {
    let line = Line::start(stage.server.port(), Duration::ZERO);
    let client = PgLockClient::connect(&line.url(&stage.schema.url())).unwrap();
    let token = CancelToken::new();
    for (form, client, goals) in [
        ("without a token", client.clone(), [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("with a token", client.cancellable(&token), [2.0, 2.0, 1.0, 1.0, 2.0]),
    ] {
        let warm = client.acquire("warm", TTL).unwrap().acquired().unwrap();
        client.release(&warm.lock_id).unwrap();
        let mut id = String::new();
        let mut count = |what: usize| {
            let before = line.messages();
            match what {
                0 => id = client.acquire("k", TTL).unwrap().acquired().unwrap().lock_id,
                1 => drop(client.extend(&id, TTL).unwrap()),
                2 => drop(client.is_locked("k").unwrap()),
                3 => drop(client.lookup(Lookup::LockId(&id)).unwrap()),
                _ => drop(client.release(&id).unwrap()),
            }
            line.messages() - before
        };
        for (what, name) in ["acquire", "extend", "is_locked", "lookup", "release"].iter().enumerate() {
            let messages = count(what) as f64;
            let figure = format!("round trips: {name} {form}");
            stage.report.count(&figure, messages, AtMost(goals[what]), "counted on the line");
        }
    }
}

/// A fenced transaction leaves its trace on the counter; the next acquire is to pay nothing for it.
fn after_a_fenced_transaction(stage: &Stage) {
    let line = Line::start(stage.server.port(), Duration::ZERO);
    let client = PgLockClient::connect(&line.url(&stage.schema.url())).unwrap();
    let mut direct = stage.schema.client();
    let mut pay = || {
        let guard = client.lock("pay").unwrap();
        let mut transaction = direct.transaction().unwrap();
        guard.fence_transaction(&mut transaction).unwrap();
        transaction.commit().unwrap();
        guard.release().map(drop).unwrap();
    };
    (0..3).for_each(|_| pay());
    let before = line.messages();
    let grant = client.acquire("pay", TTL).unwrap().acquired().unwrap();
    let messages = (line.messages() - before) as f64;
    client.release(&grant.lock_id).unwrap();
    let figure = "round trips: acquire after a fenced transaction";
    stage.report.count(figure, messages, AtMost(1.0), "counted on the line");
}

/// Allocations of the whole process per operation, the driver's among them.
fn allocations(stage: &Stage) {
    let url = stage.schema.socket_url();
    let client = PgLockClient::connect(&url).unwrap();
    let mut floor = Floor::new(&url);
    let count = |mut work: Box<dyn FnMut(usize) + '_>| {
        (0..20).for_each(&mut work);
        let region = Region::new(crate::ALLOCATOR);
        (0..N).for_each(&mut work);
        let change = region.change();
        (change.allocations as f64 / N as f64, change.bytes_allocated as f64 / N as f64)
    };
    let floors = count(Box::new(|i| floor.cycle(&format!("a{i}"))));
    let ours = count(Box::new(|i| {
        let grant = client.acquire(&format!("a{i}"), TTL).unwrap().acquired().unwrap();
        client.release(&grant.lock_id).unwrap();
    }));
    let note = format!("floor {:.0}; bytes: ours {:.0}, floor {:.0}", floors.0, ours.1, floors.1);
    stage.report.count("allocations per acquire + release", ours.0.round(), Goal::None, &note);
}

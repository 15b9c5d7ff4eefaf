//! Sets, permits and runs where processes die: the server right after an answer, and server processes and clients at
//! any moment of a job that completes in its own transaction.

use std::time::Duration;

use postgres::{Client, NoTls};
use syncguard::{LockOptions, PgLockClient, RunOnce, Slot};

use crate::holder::Random;
use crate::safeguards::without;
use crate::support::wait::poll;
use crate::support::worker::{self, Parent};
use crate::support::{Config, LIMIT, Proxy, Server, Stop, Worker};

/// Commits that need not be durable stay in memory, and are gone with the server's processes.
fn server() -> Server {
    Server::start(&Config::new().set("wal_writer_delay", "10s").set("autovacuum", "off"))
}

/// What was answered before the crash, and what the same call answers after it.
type Answers = (String, String);

fn run_again(server: &Server, client: &PgLockClient, slot: Slot, claimed: bool) -> Answers {
    let crash = || server.restart(Stop::Immediate);
    let first = client.run_once("job", slot, &LockOptions::new(), |_run| {
        if claimed {
            crash();
        }
        Ok::<_, ()>(())
    });
    if !claimed {
        crash();
    }
    let again = client.run_once("job", slot, &LockOptions::new(), |_run| Ok::<_, ()>(()));
    (format!("{:?}", first.ok()), format!("{:?}", again.ok()))
}

fn set_again(server: &Server, client: &PgLockClient) -> Answers {
    let fences = || {
        let guard = client.lock_all(&["a", "b"]).unwrap();
        let fences = format!("{:?} {:?}", guard.fence("a"), guard.fence("b"));
        // Its release is not there when the server comes back: neither is its grant, if that is not durable.
        (guard, fences)
    };
    let (guard, first) = fences();
    server.restart(Stop::Immediate);
    drop(guard);
    (first, fences().1)
}

fn permit_again(server: &Server, client: &PgLockClient) -> Answers {
    let semaphore = client.semaphore("reports", 1).unwrap();
    let guard = semaphore.acquire().unwrap();
    let first = guard.fence().to_string();
    server.restart(Stop::Immediate);
    drop(guard);
    (first, semaphore.acquire().unwrap().fence().to_string())
}

fn answers(missing: &'static str) -> [Answers; 4] {
    let server = server();
    drop(PgLockClient::connect(server.url()).unwrap());
    // The tables themselves are there after a crash.
    server.client().batch_execute("CHECKPOINT").unwrap();
    let proxy = Proxy::start(server.port());
    if !missing.is_empty() {
        proxy.rewrite(move |said| without(missing, said));
    }
    let client = PgLockClient::builder().auto_create_tables(false).connect(&proxy.url(server.url())).unwrap();
    [
        run_again(&server, &client, Slot::number(7), false),
        run_again(&server, &client, Slot::number(8).claim_at_start(), true),
        set_again(&server, &client),
        permit_again(&server, &client),
    ]
}

#[test]
fn what_was_answered_is_there_after_the_server_crashed() {
    let [finished, claimed, set, permit] = answers("");
    for (first, again) in [finished, claimed] {
        assert_eq!((first.as_str(), again.as_str()), ("Some(Done(()))", "Some(AlreadyDone)"));
    }
    for (first, again) in [set, permit] {
        assert_ne!(first, again, "a fence was granted twice");
    }
    // It is the durable commit that does it. What the server writes now and then by itself may come just before a crash.
    let mut lost = [false; 4];
    for _ in 0..5 {
        for (lost, (first, again)) in lost.iter_mut().zip(answers("durable")) {
            *lost |= first == again;
        }
        if lost == [true; 4] {
            return;
        }
    }
    panic!("nothing was lost in the crash: this test shows nothing, {lost:?}");
}

/// Runs the slots of a job one after the other, from one on, until it is told to stop. Each has one effect.
fn runner(parent: &Parent) {
    let builder = PgLockClient::builder().auto_create_tables(false).operation_timeout(Duration::from_secs(2));
    let client = builder.connect(&parent.arg("url")).unwrap();
    let options = LockOptions::new().ttl(Duration::from_millis(300));
    let mut slot: u64 = parent.arg("slot").parse().unwrap();
    let mut sql = None;
    parent.say("ready");
    loop {
        let run = client.run_once("job", Slot::number(slot), &options, |run| {
            let mut connection = sql.take().or_else(|| connect(&parent.arg("url"))).ok_or("not connected")?;
            let mut transaction = connection.transaction().map_err(|_| "not begun")?;
            run.complete_in(&mut transaction).map_err(|_| "refused")?;
            let effect = "INSERT INTO effects VALUES ($1)";
            transaction.execute(effect, &[&slot.cast_signed()]).map_err(|_| "not written")?;
            transaction.commit().map_err(|_| "unknown")?;
            sql = Some(connection);
            Ok::<_, &str>(())
        });
        if let Ok(RunOnce::Done(()) | RunOnce::AlreadyDone) = run {
            parent.say(&slot.to_string());
            slot += 1;
        }
    }
}

fn connect(url: &str) -> Option<Client> {
    let mut config: postgres::Config = url.parse().ok()?;
    config.application_name("effects").connect(NoTls).ok()
}

/// Server processes of job and library, and now and then the job's own process. As often as
/// `SYNCGUARD_KILLS` says.
#[test]
fn effects_happen_once_whoever_is_killed() {
    worker::part("runner", runner);
    let kills: u32 = std::env::var("SYNCGUARD_KILLS").map_or(100, |n| n.parse().expect("a number"));
    let server = server();
    drop(PgLockClient::connect(server.url()).unwrap());
    let mut sql = server.client();
    sql.batch_execute("CREATE TABLE effects (slot int8 NOT NULL)").unwrap();
    let start = |slot: u64| {
        let (url, slot) = (server.url(), slot.to_string());
        let test = "kills::effects_happen_once_whoever_is_killed";
        let mut runner = Worker::start_alone(test, "runner", &[("url", url), ("slot", &slot)]);
        runner.expect("ready");
        runner
    };
    let (mut runner, mut done, mut random) = (start(1), 0, Random(crate::seed() | 1));
    let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                WHERE application_name IN ('syncguard', 'effects') ORDER BY random() LIMIT 1";
    let (mut processes, mut sessions) = (0, 0);
    while processes + sessions < kills {
        // Within a slot or between two: now and then one is left in peace.
        std::thread::sleep(Duration::from_micros(random.below(60_000)));
        if random.below(20) == 0 {
            runner.kill();
            processes += 1;
            while let Ok(line) = runner.try_hear(Duration::ZERO) {
                done = line.parse().unwrap();
            }
            runner = start(done + 1);
        } else {
            sessions += u32::from(sql.query_opt(kill, &[]).unwrap().is_some_and(|row| row.get(0)));
        }
        while let Ok(line) = runner.try_hear(Duration::ZERO) {
            done = line.parse().unwrap();
        }
    }
    // It goes on by itself, from whatever the last kill has left.
    let last = done;
    assert!(poll(LIMIT, || {
        while let Ok(line) = runner.try_hear(Duration::ZERO) {
            done = line.parse().unwrap();
        }
        done > last + 1
    }));
    runner.kill();
    let counted = "SELECT count(*), count(DISTINCT slot), min(slot), max(slot) FROM effects";
    let row = sql.query_one(counted, &[]).unwrap();
    let [effects, slots, first, greatest] = [0, 1, 2, 3].map(|n| row.get::<_, i64>(n));
    println!("{sessions} sessions and {processes} clients killed: {effects} effects in {slots} slots");
    assert_eq!((effects, first, greatest), (slots, 1, slots), "each slot has one effect");
    assert!(greatest >= done.cast_signed(), "each slot that is done has its effect");
}

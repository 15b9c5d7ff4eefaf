//! Negative controls: a library without one of its safeguards is caught, by the rule that should
//! catch it. And one that must pass, because correctness does not rest on it. Those of sets, permits and runs:
//! [`kind_controls`](crate::kind_controls).

use std::time::Duration;

use syncguard::{AcquireResult, CancelToken, ExtendResult, Heartbeat, LockOptions, PgLockClient};

use crate::checker::{Allow, Violation, check};
use crate::history::{Belief, Blocked, History, Op, Outcome, Run, What, now};
use crate::safeguards::without;
use crate::storm::{Report, Setup, run};
use crate::support::clock::Clock;
use crate::support::worker::{self, Parent};
use crate::support::{Action, Config, LIMIT, Proxy, Server, Worker, wait_until};
use crate::weather::Fault;

pub const TTL: Duration = Duration::from_secs(60);

const SECONDS: u64 = 4;
/// How often a storm is tried until it shows the damage: one is enough nearly always.
const TRIES: u64 = 20;

#[track_caller]
fn is_caught(missing: &'static str, fenced: bool, faults: &[Fault], rule: &str) {
    is_caught_with(false, missing, fenced, faults, rule);
}

/// In a storm of plain locks, or with the other kinds.
#[track_caller]
pub fn is_caught_with(kinds: bool, missing: &'static str, fenced: bool, faults: &[Fault], rule: &str) {
    let mut others = Vec::new();
    for n in 1..=TRIES {
        let setup = Setup {
            seconds: SECONDS,
            faults,
            without: missing,
            practice: false,
            kinds,
            fenced,
            seed: crate::seed() + n,
            operation: 700,
            pool: 3,
            pooled: false,
        };
        let Report { violations, rewritten, .. } = run(&setup);
        assert_eq!(rewritten > 0, !missing.is_empty(), "{missing:?} was taken out");
        let count = violations.iter().filter(|found| found.rule == rule).count();
        if let Some(found) = violations.iter().find(|found| found.rule == rule) {
            println!(
                "without {missing:?}, register fenced: {fenced}: caught in storm {n}, {count} × {rule}: {}",
                found.text
            );
            return;
        }
        others.extend(violations);
    }
    panic!("without {missing:?}: not noticed in {TRIES} storms; other violations: {others:?}");
}

/// A contender, which makes the one call that it is told to make, and says what it was told.
fn contender(parent: &Parent) {
    let client = PgLockClient::connect(&parent.arg("url")).expect("the server is there");
    let client = if parent.arg("messages") == "2" { client.cancellable(&CancelToken::new()) } else { client };
    client.is_locked("warm").expect("the server is there");
    parent.say("ready");
    let call = parent.hear();
    let decided = |expires_at_ms: i64| expires_at_ms - i64::try_from(TTL.as_millis()).expect("it is small");
    let answer = match call.as_str() {
        "extend" => client.extend(STRANGER, TTL).map(|answer| match answer {
            ExtendResult::Extended { expires_at_ms } => format!("ok 0 {}", decided(expires_at_ms)),
            ExtendResult::NotHeld => "refused".to_owned(),
        }),
        "acquire" => client.acquire("k", TTL).map(|answer| match answer {
            AcquireResult::Acquired(it) => format!("ok {} {}", it.fence.get(), decided(it.expires_at_ms)),
            AcquireResult::Locked => "refused".to_owned(),
        }),
        kind => crate::kind_controls::call(&client, kind),
    };
    parent.say(&answer.unwrap_or_else(|error| format!("failed {error}")));
}

/// A proxy to the server, whose statements have lost these safeguards on the way.
pub fn proxy_without(server: &Server, missing: &'static str) -> Proxy {
    let proxy = Proxy::start(server.port());
    proxy.rewrite(move |said| without(missing, said));
    proxy
}

/// At the end: something was taken out, if something was to be.
pub fn was_taken_out(proxy: &Proxy, missing: &str) {
    assert_eq!(proxy.rewritten() > 0, !missing.is_empty(), "{missing:?} was taken out");
}

/// The lock id of whoever is in the way.
pub const STRANGER: &str = "BBBBBBBBBBBBBBBBBBBBBA";

/// A row of the key and its counter, whose lease ends that many milliseconds from now.
pub fn row(key: &str, ends_in_ms: i64) -> String {
    format!(
        "INSERT INTO syncguard_fence_counters (fence_key, fence) VALUES ('fence:{key}', 1); \
         INSERT INTO syncguard_locks SELECT '{key}', '{STRANGER}', now + {ends_in_ms}, now, '000000000000001', '{key}' \
         FROM (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::int8 AS now) AS clock; "
    )
}

/// Forces a race instead of hoping for it: `contenders` call while a stranger's transaction stands in
/// their way, which began with `before` and ends once all of them wait for it.
pub struct Race<'a> {
    /// The safeguards that are taken out, see [`safeguards`](crate::safeguards).
    pub without: &'static str,
    pub messages: &'a str,
    pub call: &'a str,
    pub contenders: usize,
    /// What is there before.
    pub there: String,
    /// What the stranger does.
    pub stranger: String,
}

impl Race<'_> {
    /// What the contenders were told, and what the checker finds in it.
    fn run(&self) -> (Vec<String>, Vec<Violation>) {
        let server = Server::start(&Config::new());
        drop(PgLockClient::connect(server.url()).unwrap());
        let missing = self.without;
        let proxy = proxy_without(&server, missing);
        let url = proxy.url(server.url());
        let mut contenders: Vec<_> = (0..self.contenders)
            .map(|_| {
                Worker::start_alone(
                    "controls::without_the_upserts_condition_it_is_caught",
                    "contender",
                    &[("url", &url), ("messages", self.messages)],
                )
            })
            .collect();
        contenders.iter_mut().for_each(|contender| contender.expect("ready"));
        let mut sql = server.client();
        sql.batch_execute(&self.there).unwrap();
        let mut stranger = server.client();
        stranger.batch_execute(&format!("BEGIN; {}", self.stranger)).unwrap();
        let clock = "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::int8";
        let from_ms: i64 = sql.query_one(clock, &[]).unwrap().get(0);
        // Whatever is dated from here on is dated later than that.
        let mut later = || sql.query_one(clock, &[]).unwrap().get::<_, i64>(0) > from_ms + 1;
        wait_until(LIMIT, "the server's clock goes on", &mut later);
        contenders.iter_mut().for_each(|contender| contender.tell(self.call));
        let waiting = "SELECT count(DISTINCT pid) FROM pg_locks JOIN pg_stat_activity USING (pid) \
                       WHERE NOT granted AND application_name = 'syncguard'";
        let all = i64::try_from(self.contenders).unwrap();
        wait_until(LIMIT, "all of them wait", || {
            sql.query_one(waiting, &[]).unwrap().get::<_, i64>(0) == all
        });
        // So long that a clock from before the wait shows.
        let mut to_ms = from_ms;
        let since: i64 = sql.query_one(clock, &[]).unwrap().get(0);
        wait_until(LIMIT, "the server's clock goes on", || {
            to_ms = sql.query_one(clock, &[]).unwrap().get(0);
            to_ms > since + 50
        });
        stranger.batch_execute("COMMIT").unwrap();
        let told: Vec<_> = contenders.iter_mut().map(Worker::hear).collect();
        // The statements of sets, permits and runs are prepared with their first call.
        was_taken_out(&proxy, missing);
        let blocked = vec![Blocked { key: "k".to_owned(), from_ms, to_ms }];
        let mut history = History { blocked, ..History::default() };
        if self.stranger.contains("INSERT INTO syncguard_locks") {
            history.beliefs.push(belief(0, 1));
        }
        if self.call == "run" {
            history
                .ops
                .push(Op { what: What::Finish, ..answered(0, Outcome::Ok { number: SLOT, decided_ms: 0 }) });
        }
        for (process, line) in (1..).zip(&told) {
            if let ["ok", number, decided] = line.split(' ').collect::<Vec<_>>().as_slice() {
                let (number, decided_ms) = (number.parse().unwrap(), decided.parse().unwrap());
                history.ops.push(answered(process, Outcome::Ok { number, decided_ms }));
                if number > 0 {
                    history.beliefs.push(belief(process, number));
                    history.runs.push(Run { process, job: "k".to_owned(), slot: SLOT, begun: now() });
                }
            }
        }
        let violations = check(&history, Allow { recovery: 0 });
        println!(
            "without {missing:?}, {} in {} messages: {told:?}, {violations:?}",
            self.call, self.messages
        );
        (told, violations)
    }

    /// With all safeguards all is well; without these, it is not.
    #[track_caller]
    pub fn catches(&mut self, missing: &'static str, rule: &str) {
        self.without = "";
        let (told, violations) = self.run();
        assert!(violations.is_empty(), "{told:?}: {violations:?}");
        self.without = missing;
        let (told, violations) = self.run();
        assert!(
            violations.iter().any(|found| found.rule == rule),
            "without {missing}: not noticed, {told:?}"
        );
    }
}

/// Whoever is told that it holds a key believes it for its ttl.
fn belief(process: u32, fence: u64) -> Belief {
    let (from, ttl) = (now(), u64::try_from(TTL.as_nanos()).unwrap());
    Belief { process, key: "k".to_owned(), fence, ttl, from, to: from + ttl }
}

fn answered(process: u32, outcome: Outcome) -> Op {
    let (key, send) = ("k".to_owned(), now());
    Op {
        process,
        what: What::Extend,
        key,
        fence: 0,
        ttl: 0,
        send,
        recv: send,
        bound: 0,
        outcome,
        set: None,
        stalled: 0,
        limit: 0,
        call: 0,
        order: None,
    }
}

/// The slot of a contender's run, which the stranger marks as done.
pub const SLOT: u64 = 7;

fn holding_the_row<'a>(call: &'a str, messages: &'a str, ends_in_ms: i64) -> Race<'a> {
    Race {
        without: "",
        messages,
        call,
        contenders: 1,
        there: row("k", ends_in_ms),
        stranger: "SELECT FROM syncguard_locks FOR UPDATE".to_owned(),
    }
}

#[test]
fn without_the_row_lock_it_is_caught() {
    holding_the_row("acquire", "1", -5000).catches("row-lock,counter-lock", "unlocked");
    holding_the_row("extend", "1", 60_000).catches("row-lock", "unlocked");
}

#[test]
fn with_the_transactions_clock_it_is_caught() {
    holding_the_row("acquire", "1", -5000).catches("clock", "unlocked");
    holding_the_row("acquire", "2", -5000).catches("clock", "unlocked");
    holding_the_row("extend", "1", 60_000).catches("clock", "unlocked");
}

/// Another client, which does not queue, grants itself a key that has no row between the contender's
/// look and its write.
#[test]
fn without_the_upserts_condition_it_is_caught() {
    worker::part("contender", contender);
    for messages in ["1", "2"] {
        let (there, stranger) = (String::new(), row("k", 60_000));
        let mut race = Race { without: "", messages, call: "acquire", contenders: 1, there, stranger };
        race.catches("upsert-condition", "overlap");
    }
}

#[test]
fn without_any_of_the_locks_it_is_caught() {
    for messages in ["1", "2"] {
        let mut race = Race { contenders: 2, ..holding_the_row("acquire", messages, -5000) };
        race.catches("row-lock,counter-lock,upsert-condition,advisory-lock", "overlap");
    }
}

/// A holder whose grant is told to it late, and that says what it believes then.
fn late_holder(parent: &Parent) {
    let client =
        PgLockClient::builder().operation_timeout(Duration::from_secs(12)).connect(&parent.arg("url"));
    let client = client.expect("the server is there");
    parent.say("ready");
    parent.hear();
    // Over before the answer comes; half of it is what a busy machine may take beside that.
    let options = LockOptions::new().ttl(Duration::from_secs(2)).heartbeat(Heartbeat::Off);
    let answer = match client.lock_with("k", &options.timeout(Duration::from_secs(7))) {
        Ok(guard) if guard.is_held() => format!("held {} {}", guard.fence().get(), now()),
        Ok(_) => "handed out, not held".to_owned(),
        Err(error) => format!("failed {error}"),
    };
    parent.say(&answer);
}

/// The answer to an acquire arrives when the lease is over, and somebody else's. A holder whose clock has
/// stood still meanwhile counts its deadline from the reply: to it no time has passed since the request.
fn told_late(clock_stands: bool) -> (String, Vec<Violation>) {
    const LATE: Duration = Duration::from_secs(5);
    let server = Server::start(&Config::new());
    let client = PgLockClient::connect(server.url()).unwrap();
    let proxy = Proxy::start(server.port());
    let clock = Clock::new(server.dir()).unwrap();
    let mut holder = Worker::start_alone_with(
        "controls::with_the_deadline_counted_from_the_reply_it_is_caught",
        "late_holder",
        &[("url", &proxy.url(server.url()))],
        &clock.envs(),
    );
    holder.expect("ready");
    proxy.once("EXECUTE sg_acquire", Action::DelayAnswer(LATE));
    holder.tell("go");
    wait_until(LIMIT, "the first is granted", || client.is_locked("k").unwrap());
    if clock_stands {
        clock.set_since_boot(-i64::try_from(LATE.as_millis()).unwrap());
    }
    let mut beliefs = Vec::new();
    wait_until(LIMIT, "its lease is over, and the next one is granted", || {
        let next = client.acquire("k", TTL).unwrap().acquired();
        beliefs.extend(next.map(|next| belief(0, next.fence.get())));
        !beliefs.is_empty()
    });
    let answer = holder.hear();
    if let ["held", fence, at] = answer.split(' ').collect::<Vec<_>>().as_slice() {
        let (fence, at) = (fence.parse().unwrap(), at.parse().unwrap());
        beliefs.push(Belief { from: at, to: at, ..belief(1, fence) });
    }
    let violations = check(&History { beliefs, ..History::default() }, Allow { recovery: 0 });
    println!("told late, its clock stands: {clock_stands}: {answer}, {violations:?}");
    (answer, violations)
}

#[test]
fn with_the_deadline_counted_from_the_reply_it_is_caught() {
    worker::part("late_holder", late_holder);
    let (answer, violations) = told_late(false);
    assert!(violations.is_empty() && answer.starts_with("failed"), "{answer}: {violations:?}");
    let (answer, violations) = told_late(true);
    assert!(violations.iter().any(|found| found.rule == "overlap"), "it was not noticed: {answer}");
}

#[test]
fn with_commits_that_do_not_wait_for_the_disk_it_is_caught() {
    is_caught("durable", true, &[Fault::CrashServer], "fence");
}

#[test]
fn a_register_without_fences_is_caught() {
    is_caught("", false, &[Fault::StopHolder], "register");
}

#[test]
fn without_the_advisory_lock_nothing_is_wrong() {
    let faults = [Fault::Messages, Fault::LockRow, Fault::CrashServer, Fault::StopHolder];
    let report = run(&Setup {
        seconds: 2 * SECONDS,
        faults: &faults,
        without: "advisory-lock",
        practice: false,
        kinds: false,
        fenced: true,
        seed: crate::seed(),
        operation: 700,
        pool: 3,
        pooled: false,
    });
    assert!(report.rewritten > 0, "it was taken out");
    assert!(report.violations.is_empty(), "{:#?}", report.violations);
    assert!(report.leaks.is_empty(), "{:#?}", report.leaks);
}

//! Runs whose messages or answers are lost on the way, or come late.

use super::*;
use crate::support::{Action, LIMIT, Network, Proxy, server, wait_until};
use crate::support::{TTL, id};
use postgres::NoTls;
use syncguard::LockBackend as _;
use syncguard::backend::{Attempt, BeginOutcome, BeginRun, Clock, MarkRun, MarkStep};

/// A client through a proxy, with its statements prepared.
fn through(place: &Place) -> (PgLockClient, Proxy) {
    let proxy = Proxy::start(server().port());
    let mut config: postgres::Config = proxy.url(&place.schema.url()).parse().unwrap();
    config.application_name(&unique());
    let builder = PgLockClient::builder().auto_create_tables(false);
    let client = builder.operation_timeout(Duration::from_secs(3)).connect_with(config, NoTls).unwrap();
    assert_eq!(run_job(&client, &place.key("first"), Slot::number(1)).unwrap(), RunOnce::Done("made"));
    (client, proxy)
}

/// The call of a prepared statement.
fn call_of(statement: &str) -> String {
    format!("EXECUTE sg_{statement}_")
}

#[test]
fn a_lost_answer_is_asked_for_again_and_changes_nothing() {
    let place = place();
    let (client, proxy) = through(&place);
    for (n, action) in [Action::CutAnswerAt(0), Action::CutNow, Action::CutQueryAt(0)].into_iter().enumerate()
    {
        for (statement, slot) in [
            ("begin_run", Slot::number(7)),
            ("begin_run", Slot::every(ms(1))),
            ("finish_run", Slot::number(7)),
            ("claim_run", Slot::number(7).claim_at_start()),
        ] {
            let name = place.key(&format!("{statement} {n} {slot:?}"));
            proxy.once(&call_of(statement), action);
            let before = proxy.count();
            assert_eq!(
                run_job(&client, &name, slot).unwrap(),
                RunOnce::Done("made"),
                "{statement}, {action:?}"
            );
            assert!(proxy.count() > before, "{statement}: {action:?} has happened");
            assert_eq!(place.stored.counter(&name), Some(1), "{statement}, {action:?}");
            assert_eq!(place.stored.row(&name), None, "{statement}, {action:?}");
            if slot.period_ms().is_none() {
                assert_eq!(mark(&place, &name, "number"), Some(7), "{statement}, {action:?}");
                assert_eq!(run_job(&client, &name, slot).unwrap(), RunOnce::AlreadyDone);
            }
        }
    }
}

#[test]
fn the_lost_answer_to_a_verify_is_asked_for_again() {
    let place = place();
    let (client, proxy) = through(&place);
    for action in [Action::CutAnswerAt(0), Action::CutQueryAt(0)] {
        let name = place.key(&format!("{action:?}"));
        let mut connection = place.schema.client();
        let ran = client.run_once(&name, Slot::number(7), &LockOptions::new(), |run| {
            let mut transaction = connection.transaction().unwrap();
            run.complete_in(&mut transaction).unwrap();
            transaction.commit().unwrap();
            proxy.once(&call_of("verify_run"), action);
            Ok::<_, String>(())
        });
        assert_eq!(ran.unwrap(), RunOnce::Done(()), "{action:?}");
        assert_eq!(place.stored.row(&name), None);
    }
}

#[test]
fn an_end_that_cannot_be_known_is_told_as_such() {
    let place = place();
    let (client, proxy) = through(&place);
    let (name, slot) = (place.key("job"), Slot::number(7));
    let ran = client.run_once(&name, slot, &LockOptions::new(), |_run| {
        proxy.once(&call_of("finish_run"), Action::CutAnswerAt(0));
        proxy.refuse_after_it(u32::MAX);
        Ok::<_, String>(())
    });
    let error = ran.unwrap_err();
    assert!(error.is_outcome_unknown(), "{error:?}");
    assert!(
        error.to_string().starts_with("the job ran") && error.to_string().contains("not known"),
        "{error}"
    );
    assert!(!error.to_string().contains(&name));
    assert_eq!(mark(&place, &name, "number"), Some(7), "and so it was");
    proxy.refuse_after_it(0);
}

#[test]
fn a_finish_that_comes_late_does_no_harm_to_the_next_run() {
    let place = place();
    let (client, proxy) = through(&place);
    let name = place.key("job");
    let ran = client.run_once(&name, Slot::number(7), &LockOptions::new(), |_run| {
        proxy.once(&call_of("finish_run"), Action::Zombie(None));
        proxy.refuse_after_it(u32::MAX);
        Ok::<_, String>(())
    });
    assert!(ran.unwrap_err().is_outcome_unknown());
    place.client.operator().break_lock(&name, "a test").unwrap();
    let ran = place.client.run_once(&name, Slot::number(8), &LockOptions::new(), |run| {
        proxy.open_gate();
        wait_until(LIMIT, "the late message is over", || proxy.zombies_over() == 1);
        assert_eq!(mark(&place, &name, "number"), None, "it marks nothing");
        Ok::<_, String>(run.is_held() && place.stored.row(&name).is_some())
    });
    assert_eq!(ran.unwrap(), RunOnce::Done(true));
    proxy.network(Network::Open);
}

#[test]
fn a_begin_that_comes_late_uses_no_slot_up() {
    let place = place();
    let (client, proxy) = through(&place);
    for (word, slot) in [("plain", Slot::number(7)), ("claimed", Slot::number(7).claim_at_start())] {
        let name = place.key(word);
        let over = proxy.zombies_over();
        proxy.once(&call_of("begin_run"), Action::Twice(ms(500)));
        assert_eq!(run_job(&client, &name, slot).unwrap(), RunOnce::Done("made"), "{word}");
        wait_until(LIMIT, "the late message is over", || proxy.zombies_over() > over);
        assert_eq!(mark(&place, &name, "number"), Some(7));
        assert_eq!(place.stored.row(&name), None, "the slot is done: it is not granted again");
        assert_eq!(run_job(&place.client, &name, Slot::number(8)).unwrap(), RunOnce::Done("made"));
    }
}

/// Between the begin that finds its own row and the confirmation of it somebody else may come.
#[test]
fn a_begin_that_is_asked_for_again_is_begun_only_while_its_own_row_lives() {
    let place = place();
    let (client, proxy) = through(&place);
    for (n, (change, begun)) in [
        ("UPDATE syncguard_locks SET user_key = user_key", true),
        ("UPDATE syncguard_locks SET expires_at_ms = 0", false),
        ("UPDATE syncguard_locks SET lock_id = 'BBBBBBBBBBBBBBBBBBBBBA'", false),
        ("UPDATE syncguard_locks SET key = key || '-other'", false),
    ]
    .into_iter()
    .enumerate()
    {
        let (name, lock_id) = (place.key(&format!("job {n}")), id("mine"));
        let attempt = Attempt::new(&name, &lock_id, TTL, Clock::system().now().after(LIMIT));
        let begin = BeginRun::new(attempt, Slot::number(1));
        let begin = || client.begin_run(&begin, &CancelToken::never()).unwrap();
        let BeginOutcome::Begun(first) = begin() else { panic!("it is free") };
        let (mut sql, confirm) = (place.schema.client(), call_of("confirm_run"));
        proxy.on_query(move |said| {
            if said.contains(&confirm) {
                sql.batch_execute(change).unwrap();
            }
            Action::Pass
        });
        match begin() {
            BeginOutcome::Begun(again) => {
                assert_eq!((begun, again.grant.acquired), (true, first.grant.acquired), "{change}");
            }
            other => assert_eq!((begun, &other), (false, &BeginOutcome::Running), "{change}"),
        }
        proxy.pass_all();
        place.stored.run("DELETE FROM syncguard_locks");
    }
}

/// A later slot is done by then: whoever lowered its mark would let it run again.
#[test]
fn a_mark_that_comes_late_lowers_no_newer_one() {
    let place = place();
    for (n, step) in [MarkStep::Claim, MarkStep::Finish].into_iter().enumerate() {
        let (name, lock_id) = (place.key(&format!("job {n}")), id("mine"));
        let deadline = Clock::system().now().after(LIMIT);
        let begin = BeginRun::new(Attempt::new(&name, &lock_id, TTL, deadline), Slot::number(5));
        let BeginOutcome::Begun(run) = place.client.begin_run(&begin, &CancelToken::never()).unwrap() else {
            panic!("it is free")
        };
        let newer = "INSERT INTO syncguard_fence_counters (fence_key, fence) VALUES ($1, 7)";
        place.stored.client().execute(newer, &[&format!("fence:{name}\u{2126}number")]).unwrap();
        let fence = run.grant.acquired.fence;
        let late = MarkRun::new(&name, &lock_id, fence, Slot::number(5), 5);
        let answer = place.client.mark_run(&late, step, deadline);
        assert_eq!(mark(&place, &name, "number"), Some(7), "{answer:?}");
        place.stored.run("DELETE FROM syncguard_locks");
    }
}

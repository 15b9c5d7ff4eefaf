//! Runs that mark their slot in a transaction of their own, with what they write.

use super::*;
use crate::support::Stored;
use postgres::Client;

fn effects(stored: &Stored) -> i64 {
    stored.one("SELECT count(*) FROM effects", &[]).get(0)
}

fn with_effects() -> (Place, Client) {
    let place = place();
    place.stored.run("CREATE TABLE effects (slot int8)");
    let connection = place.schema.client();
    (place, connection)
}

/// How the job ends its transaction.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Commit,
    RollBack,
}

fn complete(place: &Place, connection: &mut Client, name: &str, slot: Slot, end: End) -> Result<Outcome> {
    place.client.run_once(name, slot, &LockOptions::new(), |run| {
        let mut transaction = connection.transaction().unwrap();
        run.complete_in(&mut transaction).unwrap();
        transaction.execute("INSERT INTO effects VALUES (7)", &[]).unwrap();
        match end {
            End::Commit => transaction.commit().unwrap(),
            End::RollBack => transaction.rollback().unwrap(),
        }
        Ok("made")
    })
}

#[test]
fn effects_and_mark_are_one_transaction() {
    let (place, mut connection) = with_effects();
    for (n, slot) in [Slot::number(7), Slot::every(Duration::from_secs(86_400 * 365))].into_iter().enumerate()
    {
        let name = place.key(&format!("job {n}"));
        let before = effects(&place.stored);
        let error = complete(&place, &mut connection, &name, slot, End::RollBack).unwrap_err();
        assert_eq!((error.code(), error.is_outcome_unknown()), (ErrorCode::Aborted, false));
        assert!(error.to_string().starts_with("the job ran"), "{error}");
        assert!(error.to_string().contains("complete_in"), "{error}");
        assert_eq!((effects(&place.stored), place.stored.row(&name)), (before, None), "and it is released");

        let done = complete(&place, &mut connection, &name, slot, End::Commit).unwrap();
        assert_eq!(done, RunOnce::Done("made"));
        assert_eq!((effects(&place.stored), place.stored.row(&name)), (before + 1, None));
        let again = complete(&place, &mut connection, &name, slot, End::Commit).unwrap();
        assert_eq!(again, RunOnce::AlreadyDone);
        assert_eq!(effects(&place.stored), before + 1);
    }
}

#[test]
fn the_statements_as_text_do_the_same_in_a_transaction_of_another_driver() {
    let (place, mut connection) = with_effects();
    let name = place.key("job");
    for (slot, commit) in [(7, true), (8, false)] {
        let ran = place.client.run_once(&name, Slot::number(slot), &LockOptions::new(), |run| {
            connection.batch_execute("BEGIN")?;
            connection.batch_execute(&run.completion_sql().unwrap())?;
            connection.batch_execute("INSERT INTO effects VALUES (7)")?;
            connection.batch_execute(if commit { "COMMIT" } else { "ROLLBACK" })
        });
        assert_eq!(ran.is_ok(), commit, "only what was committed is done");
    }
    assert_eq!((effects(&place.stored), mark(&place, &name, "number")), (1, Some(7)));
    let ran = place.client.run_once(&name, Slot::number(9), &LockOptions::new(), |run| {
        place.stored.age(&name, 1_500);
        connection.batch_execute("BEGIN")?;
        connection.batch_execute(&run.completion_sql().unwrap())
    });
    let Ok(RunOnce::Failed(error)) = ran else { panic!("the server refuses a run without its lease") };
    assert_eq!(error.code().map(postgres::error::SqlState::code), Some("22P02"));
}

#[test]
fn a_run_is_completed_by_one_transaction() {
    let (place, mut connection) = with_effects();
    let name = place.key("job");
    let ran = place.client.run_once(&name, Slot::number(7), &LockOptions::new(), |run| {
        let mut transaction = connection.transaction().unwrap();
        run.complete_in(&mut transaction).unwrap();
        transaction.commit().unwrap();
        let mut second = connection.transaction().unwrap();
        let error = run.complete_in(&mut second).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Aborted, "{error:?}");
        assert!(error.to_string().contains("done already"), "{error}");
        assert!(second.execute("INSERT INTO effects VALUES (7)", &[]).is_err(), "it cannot commit");
        Ok::<_, String>(())
    });
    assert_eq!(ran.unwrap(), RunOnce::Done(()));
    assert_eq!(effects(&place.stored), 0);
}

#[test]
fn a_run_without_its_lease_cannot_commit() {
    let (place, mut connection) = with_effects();
    let (name, slot) = (place.key("job"), Slot::number(7));
    let ran = place.client.run_once(&name, slot, &LockOptions::new(), |run| {
        place.stored.age(&name, 1_500);
        let mut transaction = connection.transaction().unwrap();
        let error = run.complete_in(&mut transaction).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Aborted, "{error:?}");
        assert!(transaction.execute("INSERT INTO effects VALUES (7)", &[]).is_err(), "it cannot commit");
        Ok::<_, String>(())
    });
    // It said that it was well, and its effects are not there: never the end's own mark.
    assert_eq!(ran.unwrap_err().code(), ErrorCode::Aborted);
    assert_eq!((effects(&place.stored), mark(&place, &name, "number")), (0, None));
}

#[test]
fn an_open_transaction_keeps_the_next_run_out_until_it_is_known_how_it_ends() {
    let (place, mut connection) = with_effects();
    let (name, slot) = (place.key("job"), Slot::number(7));
    let mut transaction = connection.transaction().unwrap();
    let ran = place.client.run_once(&name, slot, &LockOptions::new(), |run| {
        run.complete_in(&mut transaction).unwrap();
        Ok::<_, String>(())
    });
    assert_eq!(ran.unwrap_err().code(), ErrorCode::Aborted, "it was not committed before the job returned");
    assert_eq!(run_job(&place.client, &name, slot).unwrap(), RunOnce::Running, "the counter is busy");
    transaction.execute("INSERT INTO effects VALUES (7)", &[]).unwrap();
    transaction.commit().unwrap();
    assert_eq!(run_job(&place.client, &name, slot).unwrap(), RunOnce::AlreadyDone);
    assert_eq!(effects(&place.stored), 1);
}

#[test]
fn a_job_that_failed_after_its_commit_is_done_all_the_same() {
    let (place, mut connection) = with_effects();
    let (name, slot) = (place.key("job"), Slot::number(7));
    let ran = place.client.run_once(&name, slot, &LockOptions::new(), |run| {
        let mut transaction = connection.transaction().unwrap();
        run.complete_in(&mut transaction).unwrap();
        transaction.commit().unwrap();
        Err::<(), _>("too late")
    });
    assert_eq!(ran.unwrap(), RunOnce::Failed("too late"));
    assert_eq!(run_job(&place.client, &name, slot).unwrap(), RunOnce::AlreadyDone);
}

#[test]
fn a_claimed_slot_is_not_completed_in_a_transaction() {
    let (place, mut connection) = with_effects();
    let name = place.key("job");
    let ran = place.client.run_once(&name, Slot::number(7).claim_at_start(), &LockOptions::new(), |run| {
        let mut transaction = connection.transaction().unwrap();
        let error = run.complete_in(&mut transaction).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
        transaction.execute("INSERT INTO effects VALUES (7)", &[]).unwrap();
        transaction.commit().unwrap();
        Ok::<_, String>(())
    });
    assert_eq!(ran.unwrap(), RunOnce::Done(()));
    assert_eq!(effects(&place.stored), 1);
}

#[test]
fn its_commit_is_durable_whatever_the_session_says() {
    let (place, mut connection) = with_effects();
    for (level, durable) in [("off", "on"), ("remote_apply", "remote_apply")] {
        connection.batch_execute(&format!("SET synchronous_commit TO {level}")).unwrap();
        let ran = place.client.run_once(&place.key(level), Slot::number(7), &LockOptions::new(), |run| {
            let mut transaction = connection.transaction().unwrap();
            run.complete_in(&mut transaction).unwrap();
            let setting: String = transaction.query_one("SHOW synchronous_commit", &[]).unwrap().get(0);
            transaction.commit().unwrap();
            Ok::<_, String>(setting)
        });
        assert_eq!(ran.unwrap(), RunOnce::Done(durable.to_owned()));
        let setting: String = connection.query_one("SHOW synchronous_commit", &[]).unwrap().get(0);
        assert_eq!(setting, level, "for that transaction alone");
    }
}

#[test]
fn a_transaction_whose_mark_a_trigger_puts_back_cannot_commit() {
    for body in ["RETURN NULL", "NEW.fence := OLD.fence; RETURN NEW"] {
        let (place, mut connection) = with_effects();
        let name = place.key("job");
        assert_eq!(run_job(&place.client, &name, Slot::number(1)).unwrap(), RunOnce::Done("made"));
        of_marks_in_the_way(&place, body);
        let ran = place.client.run_once(&name, Slot::number(7), &LockOptions::new(), |run| {
            let mut transaction = connection.transaction().unwrap();
            let refused = run.complete_in(&mut transaction).is_err();
            transaction.rollback().unwrap();
            Err::<(), _>(refused)
        });
        assert_eq!(ran.unwrap(), RunOnce::Failed(true), "{body}");
        assert_eq!(mark(&place, &name, "number"), Some(1), "{body}");
    }
}

#[test]
fn a_callers_pool_serves_the_run_and_its_transaction() {
    let (place, _connection) = with_effects();
    let manager = r2d2_postgres::PostgresConnectionManager::new(place.schema.config(), postgres::NoTls);
    let pool = r2d2::Pool::builder().max_size(3).min_idle(Some(0)).build(manager).unwrap();
    let client = PgLockClient::builder().build(pool.clone()).unwrap();
    for number in 1..=20 {
        let ran = client.run_once("job", Slot::number(number), &LockOptions::new(), |run| {
            let mut connection = pool.get().unwrap();
            let mut transaction = connection.transaction().unwrap();
            run.complete_in(&mut transaction).unwrap();
            transaction.execute("INSERT INTO effects VALUES (1)", &[]).unwrap();
            transaction.commit().unwrap();
            Ok::<_, String>(())
        });
        assert_eq!(ran.unwrap(), RunOnce::Done(()), "{number}");
    }
    assert_eq!(effects(&place.stored), 20);
}

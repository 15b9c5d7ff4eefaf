//! What a holder needs to run jobs once per slot.

use super::*;
use syncguard::{RunOnce, Slot};

pub(super) fn parts(stage: &Stage) -> Vec<Part<'_>> {
    let options = || LockOptions::new().heartbeat(Heartbeat::Off);
    let slot = Slot::number(7);
    vec![
        (
            "run once",
            Box::new(move |client| {
                let ran = client.run_once("k", slot, &options(), |_run| Ok::<_, ()>(()))?;
                assert_eq!(ran, RunOnce::Done(()));
                let ran = client.run_once("k", Slot::number(8), &options(), |_run| Ok::<_, ()>(()))?;
                assert_eq!(ran, RunOnce::Done(()));
                Ok(())
            }),
        ),
        (
            "run once, claimed",
            Box::new(move |client| {
                let ran = client.run_once("k", slot.claim_at_start(), &options(), |_run| Ok::<_, ()>(()))?;
                assert_eq!(ran, RunOnce::Done(()));
                Ok(())
            }),
        ),
        (
            "run once, completed",
            Box::new(move |client| {
                let mut writer = stage.role.config().connect(NoTls).unwrap();
                let ran = client.run_once("k", slot, &options(), |run| {
                    let mut tx = writer.transaction().unwrap();
                    run.complete_in(&mut tx)?;
                    tx.commit().unwrap();
                    Ok::<_, LockError>(())
                })?;
                match ran {
                    RunOnce::Done(()) => Ok(()),
                    RunOnce::Failed(error) => Err(error),
                    other => panic!("{other:?}"),
                }
            }),
        ),
    ]
}

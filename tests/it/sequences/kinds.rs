//! What sets, permits and runs do in a history, on both backends.

use syncguard::backend::{
    Attempt, AttemptAll, BeginOutcome, BeginRun, GrantAll, MarkOutcome, MarkRun, MarkStep, Moment,
    PermitAttempt, ReleaseOutcome,
};
use syncguard::{CancelToken, Fence, LockBackend, Lookup, Slot};

use crate::sequences::steps::{Clients, Form, Kind, PERMITS};
use crate::sequences::world::{Answer, Stop, World, code, length, same};

impl World<'_> {
    pub(crate) fn kind(&mut self, kind: Kind) -> Result<(), Stop> {
        match kind {
            Kind::AttemptAll { clients, fresh, ttl, form } => self.attempt_all(clients, fresh, ttl, form),
            Kind::ReleaseAll { clients } => {
                let ids = self.names.of_all(&clients);
                let ids: Vec<_> = ids.iter().map(|(_, lock_id)| lock_id.as_str()).collect();
                self.both("release_all", |backend| {
                    let released = backend.release_all(&ids, Moment::NEVER);
                    let all = |outcomes: Vec<_>| {
                        outcomes.iter().map(|one| *one == ReleaseOutcome::Released).collect::<Vec<_>>()
                    };
                    (released.map(all).map_err(|error| code(&error)), None)
                })
            }
            Kind::Permit { client, limit, fresh, ttl, form } => {
                let (lock_id, limit) = self.names.permit(client, limit, fresh);
                self.permit(&lock_id, limit, ttl, form)
            }
            Kind::InUse { form } => {
                let (name, token) = (self.names.keys[0].clone(), self.token(form));
                self.both("permits_in_use", |backend| {
                    let count = backend.permits_in_use(&name, PERMITS, Moment::NEVER, &token);
                    (count.map_err(|error| code(&error)), None)
                })
            }
            Kind::Begin { key, client, slot, fresh, ttl, form } => {
                self.begin((key, client), (slot, fresh), ttl, form)
            }
            Kind::Mark { key, client, step } => self.mark((key, client), step),
            Kind::Complete { key, client } => self.complete((key, client)),
            Kind::SetMark { key, slot } => {
                let key = &self.names.keys[key];
                self.model.set_mark(key, Slot::number(slot), slot).unwrap();
                self.tables.set_counter(&format!("{key}\u{2126}number"), slot);
                Ok(())
            }
        }
    }

    fn attempt_all(&mut self, clients: Clients, fresh: bool, ttl: usize, form: Form) -> Result<(), Stop> {
        for (key, client) in clients.iter().enumerate() {
            client.map(|client| self.names.renewed(key, client, fresh));
        }
        let ids = self.names.of_all(&clients);
        let leases: Vec<_> =
            ids.iter().map(|(key, lock_id)| (self.names.keys[*key].as_str(), lock_id.as_str())).collect();
        let (attempt, token) = (AttemptAll::new(&leases, length(ttl), Moment::NEVER), self.token(form));
        self.both("grant_all", |backend| match backend.grant_all(&attempt, &token) {
            Ok(GrantAll::Granted(grants)) => {
                let acquired = || grants.iter().map(|grant| &grant.acquired);
                let all = acquired().map(|it| (it.lock_id.clone(), it.fence.get())).collect::<Vec<_>>();
                (Ok(Ok(all)), acquired().map(|it| it.expires_at_ms).min())
            }
            Ok(GrantAll::Held { index, .. }) => (Ok(Err(index)), None),
            Ok(other) => panic!("{other:?}"),
            Err(error) => (Err(code(&error)), None),
        })
    }

    fn permit(&self, lock_id: &str, limit: u32, ttl: usize, form: Form) -> Result<(), Stop> {
        let (name, token) = (self.names.keys[0].as_str(), self.token(form));
        let attempt = PermitAttempt::new(name, limit, lock_id, length(ttl), Moment::NEVER);
        self.both("grant_permit", |backend| match backend.grant_permit(&attempt, &token) {
            Ok(Some(permit)) => {
                let granted = permit.grant.acquired;
                let answer = (permit.number, granted.lock_id, granted.fence.get());
                (Ok(Some(answer)), Some(granted.expires_at_ms))
            }
            Ok(None) => (Ok(None), None),
            Err(error) => (Err(code(&error)), None),
        })
    }

    fn begin(
        &mut self,
        (key, client): (usize, usize),
        (slot, fresh): (u64, bool),
        ttl: usize,
        form: Form,
    ) -> Result<(), Stop> {
        let lock_id = self.names.renewed(key, client, fresh);
        let (name, token) = (self.names.keys[key].clone(), self.token(form));
        let attempt = Attempt::new(&name, &lock_id, length(ttl), Moment::NEVER);
        let begin = BeginRun::new(attempt, Slot::number(slot));
        let ask = |backend: &dyn LockBackend| begun(backend.begin_run(&begin, &token));
        let expected = ask(&self.model);
        if let Ok(Begun::Run { fence, .. }) = expected.0 {
            self.names.runs[key][client] = (fence, slot);
        }
        self.same("begin_run", &expected, &ask(self.client))
    }

    fn mark(&self, (key, client): (usize, usize), step: MarkStep) -> Result<(), Stop> {
        let (name, lock_id) = (&self.names.keys[key], self.names.mine(key, client));
        let (fence, slot) = self.names.runs[key][client];
        let run = MarkRun::new(name, &lock_id, Fence::new(fence).unwrap(), Slot::number(slot), slot);
        self.both("mark_run", |backend| {
            let marked = backend.mark_run(&run, step, Moment::NEVER);
            (marked.map_err(|error| code(&error)), None::<i64>) as Answer<MarkOutcome>
        })
    }

    /// The model has no transactions of callers: what one comes to is told by what is there.
    fn complete(&mut self, (key, client): (usize, usize)) -> Result<(), Stop> {
        let (name, lock_id) = (self.names.keys[key].clone(), self.names.mine(key, client));
        let (number, slot) = self.names.runs[key][client];
        let fence = Fence::new(number).unwrap();
        let run = MarkRun::new(&name, &lock_id, fence, Slot::number(slot), slot);
        let statements = LockBackend::completion_statement(self.client, &run).unwrap();
        let lease = self.model.lookup_raw(Lookup::LockId(&lock_id), &CancelToken::never()).unwrap();
        let held = lease.is_some_and(|lease| lease.fence == fence && lease.key == name);
        let newest = self.model.counter(&name) == Some(number);
        let last = self.model.mark(&name, Slot::number(slot)).unwrap();
        let expected = held && newest && last.is_none_or(|last| last < slot);
        same("complete_in", &expected, &self.tables.commits(&statements))?;
        if expected {
            self.model.set_mark(&name, Slot::number(slot), slot).unwrap();
        }
        Ok(())
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Begun {
    Run { lock_id: String, fence: u64, slot: u64, last: Option<u64> },
    AlreadyDone,
    Running,
}

fn begun(answer: syncguard::Result<BeginOutcome>) -> Answer<Begun> {
    match answer {
        Ok(BeginOutcome::Begun(run)) => {
            let granted = run.grant.acquired;
            let (fence, slot, last) = (granted.fence.get(), run.slot, run.last);
            (Ok(Begun::Run { lock_id: granted.lock_id, fence, slot, last }), Some(granted.expires_at_ms))
        }
        Ok(BeginOutcome::AlreadyDone) => (Ok(Begun::AlreadyDone), None),
        Ok(BeginOutcome::Running) => (Ok(Begun::Running), None),
        Ok(other) => panic!("{other:?}"),
        Err(error) => (Err(code(&error)), None),
    }
}

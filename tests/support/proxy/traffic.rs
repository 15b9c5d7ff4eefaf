//! The bytes between a client and its server, message by message.

use std::io::{self, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::queries::Queries;
use super::{Action, Inner, Network};
use crate::frames::{query, read_frame, refuse_tls, sqlstate};

/// What is to be done with the answer that is under way.
enum Answer {
    Pass,
    /// Collected up to its end.
    CutAt(usize, Vec<u8>),
    Swallow,
    Delay(Duration),
    /// That to what was said first is nobody's business.
    PassSecond,
    /// Of a zombie: nobody listens.
    Unheard,
}

pub(super) fn accept(listener: &TcpListener, inner: &Arc<Inner>) {
    for client in listener.incoming() {
        if inner.state().closing {
            return;
        }
        let Ok(client) = client else { continue };
        let mut state = inner.state();
        let refuses = state.refusals > 0 && !state.counts.is_empty();
        state.refusals -= u32::from(refuses);
        if refuses || state.network == Network::Refusing {
            continue;
        }
        drop(state);
        let there = Arc::clone(inner);
        thread::spawn(move || {
            there.wait_for_network();
            let Ok(server) = TcpStream::connect(("127.0.0.1", there.server)) else { return };
            let _ = serve(&there, client, &server);
        });
    }
}

fn serve(inner: &Arc<Inner>, client: TcpStream, server: &TcpStream) -> io::Result<()> {
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let id = {
        let mut state = inner.state();
        state.next += 1;
        let id = state.next;
        state.open.insert(id, (client.try_clone()?, server.try_clone()?));
        id
    };
    let answer = Arc::new(Mutex::new(Answer::Pass));
    let idle = Arc::new(AtomicBool::new(false));
    let back = {
        let (inner, answer, idle) = (Arc::clone(inner), Arc::clone(&answer), Arc::clone(&idle));
        let (client, server) = (client.try_clone()?, server.try_clone()?);
        thread::spawn(move || {
            let _ = pump_answers(&inner, server, &client, (&answer, &idle));
            let _ = client.shutdown(Shutdown::Both);
        })
    };
    let outcome = pump_queries(inner, client, server, (&answer, &idle));
    // A late query's connection lives on until it is answered.
    if !matches!(*answer.lock().unwrap_or_else(PoisonError::into_inner), Answer::Unheard) {
        let _ = server.shutdown(Shutdown::Write);
    }
    let _ = back.join();
    inner.state().open.remove(&id);
    outcome
}

/// From client to server; returns when the client has gone and all it said is delivered.
fn pump_queries(
    inner: &Inner,
    mut client: TcpStream,
    mut server: &TcpStream,
    (answer, idle): (&Mutex<Answer>, &AtomicBool),
) -> io::Result<()> {
    let set = |what| *answer.lock().unwrap_or_else(PoisonError::into_inner) = what;
    let cut = |client: &TcpStream| {
        let _ = client.shutdown(Shutdown::Both);
        let _ = server.shutdown(Shutdown::Both);
        Ok(())
    };
    refuse_tls(&mut client)?;
    let mut queries = Queries::default();
    loop {
        let (frame, sql) = queries.read(&mut client)?;
        inner.wait_for_network();
        let Some(sql) = sql else {
            server.write_all(&frame)?;
            continue;
        };
        let action = inner.decide(&sql);
        let frame = inner.rewrite(frame, &queries);
        match action {
            Action::CutQueryAt(n) => {
                server.write_all(frame.get(..n.min(frame.len() - 1)).unwrap_or_default())?;
                return cut(&client);
            }
            Action::CutNow => {
                set(Answer::Swallow);
                server.write_all(&frame)?;
                return cut(&client);
            }
            Action::CutAnswerAt(n) => set(Answer::CutAt(n, Vec::new())),
            Action::SwallowAnswer => set(Answer::Swallow),
            Action::DelayQuery(delay) => {
                set(Answer::Pass);
                thread::sleep(delay);
            }
            Action::DiscardAll | Action::SayFirst(_) if idle.load(Ordering::SeqCst) => {
                set(Answer::PassSecond);
                let said = if let Action::SayFirst(said) = action { said } else { "DISCARD ALL" };
                server.write_all(&query(said))?;
            }
            // Within a transaction there is nothing to discard.
            Action::Pass | Action::DiscardAll | Action::SayFirst(_) => set(Answer::Pass),
            Action::DelayAnswer(delay) => set(Answer::Delay(delay)),
            Action::Zombie(_) | Action::Twice(_) => {
                let delay = match action {
                    Action::Twice(delay) => {
                        set(Answer::Swallow);
                        server.write_all(&frame)?;
                        Some(delay)
                    }
                    Action::Zombie(delay) => {
                        set(Answer::Unheard);
                        delay
                    }
                    _ => None,
                };
                let _ = client.shutdown(Shutdown::Both);
                inner.wait_for_gate(delay);
                set(Answer::Unheard);
                if server.write_all(&frame).is_err() {
                    inner.state().zombies_over += 1;
                }
                return Ok(());
            }
        }
        server.write_all(&frame)?;
    }
}

/// From server to client; returns when the server has gone.
fn pump_answers(
    inner: &Inner,
    mut server: TcpStream,
    mut client: &TcpStream,
    (answer, idle): (&Mutex<Answer>, &AtomicBool),
) -> io::Result<()> {
    loop {
        let frame = read_frame(&mut server, false);
        inner.wait_for_network();
        let mut answer = answer.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*answer, Answer::Unheard)
            && let Ok(frame) = &frame
            && let Some(state) = sqlstate(frame)
        {
            inner.state().late_error = Some(state);
        }
        if matches!(*answer, Answer::Unheard) && frame.as_ref().is_ok_and(|frame| frame[0] == b'Z')
            || frame.is_err()
        {
            if matches!(*answer, Answer::Unheard) {
                inner.state().zombies_over += 1;
            }
            return frame.map(drop);
        }
        let frame = frame?;
        if frame.first() == Some(&b'Z') {
            idle.store(frame.get(5) == Some(&b'I'), Ordering::SeqCst);
        }
        match &mut *answer {
            Answer::Pass => client.write_all(&frame)?,
            Answer::CutAt(n, so_far) => {
                so_far.extend_from_slice(&frame);
                if frame.first() == Some(&b'Z') {
                    client.write_all(so_far.get(..*n).unwrap_or(so_far))?;
                    inner.state().last_answer = so_far.len();
                    let _ = client.shutdown(Shutdown::Both);
                    return server.shutdown(Shutdown::Both);
                }
            }
            Answer::PassSecond if frame.first() == Some(&b'Z') => *answer = Answer::Pass,
            Answer::Swallow | Answer::Unheard | Answer::PassSecond => {}
            Answer::Delay(delay) => {
                let delay = *delay;
                *answer = Answer::Pass;
                drop(answer);
                thread::sleep(delay);
                client.write_all(&frame)?;
            }
        }
    }
}

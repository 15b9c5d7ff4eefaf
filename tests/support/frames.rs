//! Messages of the protocol, as bytes.
//!
//! <https://www.postgresql.org/docs/current/protocol-message-formats.html>

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;

use crate::sql::{self, Said};

/// One message: a type byte (not in a client's first) and a length that counts itself.
pub fn read_frame(stream: &mut TcpStream, first: bool) -> io::Result<Vec<u8>> {
    let head = if first { 4 } else { 5 };
    let mut frame = vec![0; head];
    stream.read_exact(&mut frame)?;
    let mut length = [0; 4];
    length.copy_from_slice(&frame[head - 4..]);
    let body = (u32::from_be_bytes(length) as usize).saturating_sub(4);
    frame.resize(head + body, 0);
    stream.read_exact(&mut frame[head..])?;
    Ok(frame)
}

/// The text that ends with a zero.
pub fn text_at(frame: &[u8], at: usize) -> String {
    let text = frame.get(at..).unwrap_or_default().split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// The code of an error that the server answers.
pub fn sqlstate(frame: &[u8]) -> Option<String> {
    let fields = frame.strip_prefix(b"E")?.get(4..)?;
    let code = fields.split(|byte| *byte == 0).find_map(|field| field.strip_prefix(b"C"))?;
    Some(String::from_utf8_lossy(code).into_owned())
}

/// A simple query as a message.
pub fn query(sql: &str) -> Vec<u8> {
    message(b'Q', &[sql.as_bytes(), b"\0"])
}

fn message(kind: u8, body: &[&[u8]]) -> Vec<u8> {
    let body = body.concat();
    let length = u32::try_from(body.len() + 4).unwrap_or(u32::MAX);
    [&[kind], length.to_be_bytes().as_slice(), &body].concat()
}

/// These messages of a client with other SQL texts in them, and whether any text has changed. `called` is what a
/// text of the extended protocol is called.
pub fn rewritten(
    frames: &[u8],
    called: &dyn Fn(&str) -> Option<String>,
    rewrite: &dyn Fn(Said<'_>) -> String,
) -> (Vec<u8>, bool) {
    let (mut out, mut changed) = (Vec::with_capacity(frames.len()), false);
    let mut rest = frames;
    while let [kind, a, b, c, d, ..] = *rest {
        let length = 1 + u32::from_be_bytes([a, b, c, d]) as usize;
        let (frame, after) = rest.split_at(length.min(rest.len()));
        rest = after;
        // A simple query is a text; a Parse has the statement's name before it and types behind.
        let name = if kind == b'P' { text_at(frame, 5).len() + 1 } else { 0 };
        let text = text_at(frame, 5 + name);
        let other = match kind {
            b'Q' => sql::rewritten(&text, rewrite),
            b'P' => match called(&text) {
                Some(prepare) => {
                    rewrite(Said { name: Said::read(&format!("PREPARE {prepare} AS ")).name, text: &text })
                }
                None => rewrite(Said::read(&text)),
            },
            _ => text.clone(),
        };
        if other == text {
            out.extend_from_slice(frame);
            continue;
        }
        changed = true;
        let (before, behind) = (&frame[5..5 + name], &frame[5 + name + text.len()..]);
        out.extend(message(kind, &[before, other.as_bytes(), behind]));
    }
    (out, changed)
}

/// Answers a client that asks for TLS that there is none, as a server without a certificate does. What it says
/// next is left to be read.
pub fn refuse_tls(client: &mut TcpStream) -> io::Result<()> {
    const REQUEST: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 47];
    let mut said = [0; 8];
    // Whatever a client says first has eight bytes or more.
    loop {
        match client.peek(&mut said)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            8 => break,
            _ => std::thread::yield_now(),
        }
    }
    if said == REQUEST {
        client.read_exact(&mut said)?;
        client.write_all(b"N")?;
    }
    Ok(())
}

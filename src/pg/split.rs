//! Takes options out of a connection string, and leaves the rest of it as it was: for the driver, which
//! refuses what it does not know.
//!
//! Both forms are read exactly as the driver reads them, or what it sees for an option may be something else
//! for us.

/// A connection string, without what was taken out of it.
pub(crate) struct Split {
    pub(crate) rest: String,
    /// In their order; of two of a name the last one counts.
    pub(crate) taken: Vec<(String, String)>,
}

/// None where the string cannot be read.
pub(crate) fn split(text: &str, ours: impl Fn(&str) -> bool) -> Option<Split> {
    let url = ["postgres://", "postgresql://"].iter().any(|scheme| text.starts_with(scheme));
    if url { split_url(text, &ours) } else { split_pairs(text, &ours) }
}

fn split_url(url: &str, ours: &dyn Fn(&str) -> bool) -> Option<Split> {
    let scheme = url.find("://")? + 3;
    let hosts = url.get(scheme..)?.find('@').map_or(scheme, |at| scheme + at + 1);
    let Some(query) = url.get(hosts..)?.find('?').map(|at| hosts + at) else {
        return Some(Split { rest: url.to_owned(), taken: Vec::new() });
    };
    let (mut rest, mut taken) = (url.get(..query)?.to_owned(), Vec::new());
    let mut options = url.get(query + 1..)?;
    let mut separator = '?';
    while !options.is_empty() {
        let (name, tail) = options.split_once('=')?;
        let (value, tail) = tail.split_once('&').unwrap_or((tail, ""));
        let key = decode(name)?;
        if ours(&key) {
            taken.push((key, decode(value)?));
        } else {
            rest.extend([&separator.to_string(), name, "=", value]);
            separator = '&';
        }
        options = tail;
    }
    Some(Split { rest, taken })
}

/// `%41` is `A`. What is no such code stays, as in the driver.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut left = text.as_bytes();
    while let Some((first, rest)) = left.split_first() {
        let hex = |at: usize| rest.get(at).and_then(|byte| char::from(*byte).to_digit(16));
        left = rest;
        if let (b'%', Some(high), Some(low)) = (first, hex(0), hex(1)) {
            bytes.push(u8::try_from(high * 16 + low).ok()?);
            left = rest.get(2..)?;
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).ok()
}

fn split_pairs(text: &str, ours: &dyn Fn(&str) -> bool) -> Option<Split> {
    let (mut rest, mut taken) = (String::new(), Vec::new());
    let mut left = text.trim_start();
    while !left.is_empty() {
        let begin = left;
        let end = left.find(|c: char| c.is_whitespace() || c == '=')?;
        let (name, tail) = left.split_at(end);
        if name.is_empty() {
            // The driver stops here, and forgets what follows.
            return None;
        }
        let (value, tail) = value(tail.trim_start().strip_prefix('=')?.trim_start())?;
        if ours(name) {
            taken.push((name.to_owned(), value));
        } else {
            rest.push_str(begin.get(..begin.len() - tail.len())?);
            rest.push(' ');
        }
        left = tail.trim_start();
    }
    Some(Split { rest, taken })
}

/// A value, quoted or not, and what follows it.
fn value(text: &str) -> Option<(String, &str)> {
    let quoted = text.starts_with('\'');
    let (mut value, mut escaped) = (String::new(), false);
    for (at, c) in text.char_indices().skip(usize::from(quoted)) {
        if escaped {
            value.push(c);
            escaped = false;
        } else if c == '\\' {
            escaped = true;
        } else if quoted && c == '\'' {
            return Some((value, text.get(at + 1..)?));
        } else if !quoted && c.is_whitespace() {
            return Some((value, text.get(at..)?)).filter(|(value, _)| !value.is_empty());
        } else {
            value.push(c);
        }
    }
    (!quoted && !value.is_empty()).then_some((value, ""))
}

/// A value as it stands in `name=value`, quoted.
pub(crate) fn quoted(value: &str) -> String {
    format!("'{}'", value.replace('\\', "\\\\").replace('\'', "\\'"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use postgres::Config;

    fn ours(name: &str) -> bool {
        name.starts_with("ssl")
    }

    fn taken(text: &str) -> Vec<(String, String)> {
        split(text, ours).unwrap().taken
    }

    fn pair(name: &str, value: &str) -> (String, String) {
        (name.to_owned(), value.to_owned())
    }

    #[test]
    fn options_are_taken_out_of_both_forms() {
        let url =
            "postgresql://u:p%40?@a,b:1/d?sslmode=verify-full&options=-c%20x%3Dy&sslrootcert=%2Fa%20b.pem";
        let cut = split(url, ours).unwrap();
        assert_eq!(cut.taken, [pair("sslmode", "verify-full"), pair("sslrootcert", "/a b.pem")]);
        assert_eq!(cut.rest, "postgresql://u:p%40?@a,b:1/d?options=-c%20x%3Dy");
        let pairs = r"host=a sslmode = 'verify-full' password='it\'s sslmode=x' sslrootcert=/a\ b.pem";
        let cut = split(pairs, ours).unwrap();
        assert_eq!(cut.taken, [pair("sslmode", "verify-full"), pair("sslrootcert", "/a b.pem")]);
        let rest: Config = cut.rest.parse().unwrap();
        assert_eq!(rest.get_password(), Some(&b"it's sslmode=x"[..]));
        assert_eq!(rest.get_hosts().len(), 1);
        assert_eq!(taken("postgres://h"), []);
    }

    #[test]
    fn a_question_mark_in_a_password_begins_no_options() {
        assert_eq!(taken("postgresql://u:a?sslmode=disable@h/d"), []);
        assert_eq!(taken("postgresql://u:a?b@h?sslmode=require"), [pair("sslmode", "require")]);
    }

    #[test]
    fn what_the_driver_reads_we_read_in_the_same_way() {
        let values = ["a", "a b", r"a\b", "it's", "", "=", "ü%41&?@", "sslmode=x"];
        for value in values {
            let text = format!("host=h password={} sslmode={}", quoted(value), quoted(value));
            let cut = split(&text, ours).unwrap();
            assert_eq!(cut.taken, [pair("sslmode", value)]);
            let config: Config = cut.rest.parse().unwrap();
            assert_eq!(config.get_password(), Some(value.as_bytes()));
        }
        for encoded in ["%41", "%4", "%", "%zz", "a+b", "%C3%BC"] {
            let cut = split(&format!("postgresql://u:{encoded}@h?sslkey={encoded}"), ours).unwrap();
            let config: Config = cut.rest.parse().unwrap();
            let value = cut.taken.first().unwrap().1.clone();
            assert_eq!(config.get_password(), Some(value.as_bytes()));
        }
    }

    #[test]
    fn what_the_driver_cannot_read_we_cannot_either() {
        for text in ["host", "host='a", "host= ", "=x", "a=b =c sslmode=require", "postgresql://h?sslmode"] {
            assert!(split(text, ours).is_none(), "{text}");
        }
    }
}

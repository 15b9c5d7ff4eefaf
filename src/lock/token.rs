//! One token out of two.

use std::sync::Arc;

use crate::cancel::{CancelToken, Subscription};

/// A token that fires with every one it was made of; [`CancelToken::never`] if there was none, so
/// that the backend may take its faster way.
#[derive(Clone)]
pub(crate) struct Token {
    pub(crate) token: CancelToken,
    tie: Option<Arc<Tie>>,
}

/// Ties a token to the second of the two it was made of, and keeps the ties of the first.
struct Tie {
    _second: Option<Subscription>,
    _first: Option<Arc<Self>>,
}

impl Token {
    pub(super) fn never() -> Self {
        Self { token: CancelToken::never(), tie: None }
    }

    pub(super) fn and(&self, other: &CancelToken) -> Self {
        if other.is_never() {
            return self.clone();
        }
        if self.token.is_never() {
            return Self { token: other.clone(), tie: None };
        }
        let token = self.token.child();
        let child = token.clone();
        let second = other.subscribe(move || child.cancel());
        Self { token, tie: Some(Arc::new(Tie { _second: second, _first: self.tie.clone() })) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_fires_with_each_and_fires_neither() {
        for i in 0..3 {
            let parts = [CancelToken::new(), CancelToken::new(), CancelToken::new()];
            let token = parts.iter().fold(Token::never(), |token, part| token.and(part));
            assert!(!token.token.is_cancelled());
            parts[i].cancel();
            assert!(token.token.is_cancelled());
            assert_eq!(parts.iter().filter(|part| part.is_cancelled()).count(), 1);
        }
        assert!(Token::never().and(&CancelToken::never()).token.is_never());
    }
}

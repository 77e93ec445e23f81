//! What changes logits before a token is chosen: biases, penalties, a constraint.

use super::Sampling;
use crate::error::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

/// What may come next in a text, told token by token: a grammar.
pub trait Constraint: Debug + Send {
    /// Sets the logits of tokens that must not come next to minus infinity. Errors: the grammar passes its bounds.
    fn mask(&mut self, logits: &mut [f32]) -> Result<()>;

    /// Takes note of the token that was chosen; true: the text is complete, and nothing may follow. Errors: as
    /// [`Constraint::mask`], a token that must not come.
    fn take(&mut self, token: u32) -> Result<bool>;
}

/// Changes of one text's logits, and what they depend on.
#[derive(Debug)]
pub(super) struct Changes {
    repetition: f32,
    frequency: f32,
    presence: f32,
    bias: Vec<(u32, f32)>,
    constraint: Option<Box<dyn Constraint>>,
    /// Tokens of the text, the prompt's too, if that matters.
    seen: BTreeSet<u32>,
    /// Of tokens that were chosen, how often each was, if that matters.
    written: BTreeMap<u32, u32>,
    complete: bool,
}

impl Changes {
    /// Errors: a repetition penalty that is not above 0, another one that is not finite.
    pub fn new(options: &Sampling) -> Result<Self> {
        let Sampling { repetition_penalty: repetition, frequency_penalty, presence_penalty, .. } = *options;
        if !(repetition.is_finite() && repetition > 0.0) {
            return Err(Error::invalid("sampling", "a repetition penalty above 0", repetition.to_string()));
        }
        for (name, penalty) in [("frequency", frequency_penalty), ("presence", presence_penalty)] {
            if !penalty.is_finite() {
                return Err(Error::invalid("sampling", format!("a finite {name} penalty"), penalty.to_string()));
            }
        }
        Ok(Self {
            repetition,
            frequency: frequency_penalty,
            presence: presence_penalty,
            bias: Vec::new(),
            constraint: None,
            seen: BTreeSet::new(),
            written: BTreeMap::new(),
            complete: false,
        })
    }

    /// Errors: a bias that is NaN or plus infinity; minus infinity is a token that never comes.
    pub fn set_bias(&mut self, bias: Vec<(u32, f32)>) -> Result<()> {
        if let Some((token, bias)) = bias.iter().find(|(_, bias)| bias.is_nan() || *bias == f32::INFINITY) {
            let expected = "a bias that is a number below infinity";
            return Err(Error::invalid("sampling", expected, format!("{bias} for token {token}")));
        }
        self.bias = bias;
        Ok(())
    }

    pub fn set_constraint(&mut self, constraint: Box<dyn Constraint>) {
        self.constraint = Some(constraint);
    }

    /// Whether there is anything to change.
    pub fn any(&self) -> bool {
        self.repetition != 1.0 || self.counts() || !self.bias.is_empty() || self.constraint.is_some()
    }

    fn counts(&self) -> bool {
        self.frequency != 0.0 || self.presence != 0.0
    }

    /// Takes note of tokens that the text holds already.
    pub fn saw(&mut self, tokens: &[u32]) {
        if self.repetition != 1.0 {
            self.seen.extend(tokens);
        }
    }

    pub fn apply(&mut self, logits: &mut [f32]) -> Result<()> {
        for &(token, bias) in &self.bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        for &token in &self.seen {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = if *logit > 0.0 { *logit / self.repetition } else { *logit * self.repetition };
            }
        }
        for (&token, &times) in &self.written {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit -= self.frequency * times as f32 + self.presence;
            }
        }
        match &mut self.constraint {
            None => Ok(()),
            Some(constraint) => constraint.mask(logits),
        }
    }

    /// Takes note of the token that was chosen.
    pub fn chose(&mut self, token: u32) -> Result<()> {
        self.saw(&[token]);
        if self.counts() {
            *self.written.entry(token).or_insert(0) += 1;
        }
        if let Some(constraint) = &mut self.constraint {
            self.complete = constraint.take(token)?;
        }
        Ok(())
    }

    /// Whether the constraint said that the text is complete.
    pub fn complete(&self) -> bool {
        self.complete
    }
}

#[cfg(test)]
mod tests {
    use super::super::Sampler;
    use super::*;

    #[test]
    fn penalties_count_what_was_written_and_not_the_prompt() {
        let logits = [1.0, 0.9, 0.5, -3.0];
        let choose = |options: Sampling, bias: Vec<(u32, f32)>| {
            let mut sampler = Sampler::new(options).unwrap();
            sampler.set_bias(bias).unwrap();
            sampler.saw(&[0, 0, 0]);
            (0..6).map(|_| sampler.next(&logits).unwrap()).collect::<Vec<u32>>()
        };
        // 1.0, 0.9, 0.5 less 0.3 each time: 0 (0.7 left), 1 (0.6), 0 (0.4), 1 (0.3), 2 (0.2), 0.
        let options = Sampling { frequency_penalty: 0.3, ..Sampling::default() };
        assert_eq!(choose(options, vec![]), [0, 1, 0, 1, 2, 0]);
        // Once each: 0 (0.7 left), 1 (0.6), then 0 for good.
        let options = Sampling { presence_penalty: 0.3, ..Sampling::default() };
        assert_eq!(choose(options, vec![]), [0, 1, 0, 0, 0, 0]);
        // A negative one prefers what was written.
        let options = Sampling { presence_penalty: -2.0, ..Sampling::default() };
        assert_eq!(choose(options, vec![(3, 100.0)]), [3; 6]);
        assert_eq!(choose(Sampling::default(), vec![(0, f32::NEG_INFINITY), (9, 1.0)]), [1; 6]);
        // A bias comes first: 0.5 + 1.0 is halved, which leaves less than 0.9.
        let mut sampler = Sampler::new(Sampling { repetition_penalty: 2.0, ..Sampling::default() }).unwrap();
        sampler.set_bias(vec![(2, 1.0)]).unwrap();
        sampler.saw(&[0, 2]);
        assert_eq!(sampler.next(&logits).unwrap(), 1);
        for bias in [f32::NAN, f32::INFINITY] {
            assert!(Sampler::new(Sampling::default()).unwrap().set_bias(vec![(1, bias)]).is_err());
        }
        for options in [
            Sampling { frequency_penalty: f32::NAN, ..Sampling::default() },
            Sampling { presence_penalty: f32::INFINITY, ..Sampling::default() },
        ] {
            assert!(matches!(Sampler::new(options), Err(Error::Invalid { .. })));
        }
    }

    /// Tokens 3, 2, 1 in this order.
    #[derive(Debug)]
    struct Countdown(u32);

    impl Constraint for Countdown {
        fn mask(&mut self, logits: &mut [f32]) -> Result<()> {
            for (token, logit) in logits.iter_mut().enumerate() {
                if token as u32 != self.0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
            Ok(())
        }

        fn take(&mut self, token: u32) -> Result<bool> {
            assert_eq!(token, self.0);
            self.0 -= 1;
            Ok(self.0 == 0)
        }
    }

    #[test]
    fn a_constraint_leaves_what_may_come_and_says_when_the_text_is_complete() {
        for temperature in [0.0, 2.0] {
            let mut sampler = Sampler::new(Sampling { temperature, ..Sampling::default() }).unwrap();
            sampler.set_constraint(Box::new(Countdown(3)));
            for token in [3, 2, 1] {
                assert!(sampler.needs_logits() && !sampler.complete());
                assert_eq!(sampler.next(&[9.0, 1.0, 1.0, -5.0]).unwrap(), token);
            }
            assert!(sampler.complete());
        }
    }
}

//! One layer of a model on its own: the decoder's steps, with a tap on the inputs of its linear layers, which can be replaced.

use crate::arch::spec::{LinearGroup, Residual, Spec};
use crate::comm::Alone;
use crate::decoder::{self, Layer, Mlp, Norm};
use crate::device::cpu::{OnCpu, Projection, Run, State, Tap};
use crate::error::{Error, Result};
use crate::load::Loader;
use halfbyte::cpu::attention::{KvCache, KvType, Sequence};
use halfbyte::cpu::{Cpu, nn};
use std::ops::ControlFlow;

/// A block of a model: it adds to the residual stream in two steps, attention and the MLP, or in one, where the MLP lies beside
/// attention; each step changes the stream at its end only.
#[derive(Debug)]
pub struct Block {
    layer: Layer<OnCpu>,
    state: State,
    /// Keys and values of the text at hand.
    sequence: Sequence,
}

/// The groups of linear layers of a block. Error: there is no such block.
pub fn groups(spec: &Spec, block: usize) -> Result<Vec<LinearGroup>> {
    let expected = || format!("a block below {}", spec.layers.len());
    spec.groups(block).ok_or_else(|| Error::invalid(super::OP, expected(), block.to_string()))
}

impl Block {
    /// Loads block `i`. Errors: those of loading a model, no such block.
    pub fn load(spec: &Spec, loader: &mut Loader<'_>, i: usize) -> Result<Self> {
        groups(spec, i)?;
        let layer = decoder::layer(spec, i, loader, &mut OnCpu)?;
        let mut cache = KvCache::new(1, spec.heads, spec.max_context, KvType::F32)?;
        let sequence = cache.begin();
        Ok(Self { layer, state: State::new(spec.hidden, spec.heads, cache), sequence })
    }

    /// Takes one text, from its first token on, through step `step`. Shape: stream `[tokens, hidden]`.
    ///
    /// Before each group of the step, `tap` is handed the group's place in [`groups`] and its inputs `[tokens, k]`; when it
    /// breaks, the step ends there and the stream is as it was.
    pub fn forward(
        &mut self,
        cpu: &Cpu,
        step: usize,
        stream: &mut [f32],
        tap: &mut Tap<'_>,
    ) -> Result<ControlFlow<()>> {
        let Self { layer, state, sequence } = self;
        if step == 0 {
            state.cache.truncate(*sequence, 0)?;
        }
        state.begin_with(*sequence, stream);
        let tap = &mut |group: usize, x: &[f32]| tap(group, x);
        let mut run = Run { cpu, comm: &Alone, state, tap: Some(tap) };
        let beside = layer.residual == Residual::Parallel;
        let flow = match (step, &layer.mlp_norm) {
            (0, _) => match layer.attention(&mut run, 0, false, false)? {
                ControlFlow::Continue(()) if beside => layer.mlp(&mut run, None)?,
                flow => flow,
            },
            (_, Some(norm)) => {
                decoder::Steps::norm(&mut run, false, norm, None)?;
                layer.normed_mlp(&mut run, None)?
            }
            (_, None) => return Err(Error::invalid(super::OP, "a norm before the MLP", "none")),
        };
        if flow.is_continue() {
            if beside {
                // What attention adds is there already.
                stream.copy_from_slice(state.stream());
            }
            nn::add(cpu, stream, self.state.update())?;
        }
        Ok(flow)
    }

    /// Gives a group other weights.
    pub fn replace(&mut self, group: usize, weights: Projection) {
        let attention = &mut self.layer.attention;
        match (group, &mut self.layer.mlp) {
            (0, _) => attention.qkv = weights,
            (1, _) => attention.output = weights,
            (2, Mlp::Dense(mlp)) => mlp.up = weights,
            (3, Mlp::Dense(mlp)) => mlp.down = weights,
            (_, Mlp::Dense(_)) => {}
            (group, Mlp::Experts(experts)) => {
                let count = experts.experts.len();
                if let Some(mlp) = experts.experts.get_mut((group - 2) % count.max(1)) {
                    if group < 2 + count { mlp.up = weights } else { mlp.down = weights }
                }
            }
        }
    }

    /// Gives the norm before a group another weight, as it multiplies. Does nothing for a group without one.
    pub fn replace_norm(&mut self, group: usize, weight: Vec<f32>) {
        self.norm_before(group).into_iter().for_each(|norm| norm.weight.clone_from(&weight));
    }

    /// Gives the norm before a group another bias. Does nothing for a group without one.
    pub fn replace_norm_bias(&mut self, group: usize, bias: Vec<f32>) {
        self.norm_before(group).into_iter().for_each(|norm| norm.bias = Some(bias.clone()));
    }

    fn norm_before(&mut self, group: usize) -> Option<&mut Norm<OnCpu>> {
        match group {
            0 => Some(&mut self.layer.attention.norm),
            2 => self.layer.mlp_norm.as_mut(),
            _ => None,
        }
    }
}

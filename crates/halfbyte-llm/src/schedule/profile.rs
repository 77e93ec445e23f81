//! Steps of many texts, timed.

use super::Scheduler;
use crate::error::Result;
use crate::profile::Profile;

impl Scheduler<'_> {
    /// Goes on as [`Scheduler::step`] does, each step of each layer timed by itself; None: there is nothing to do. On a GPU kernels run
    /// one by one: nothing is recorded, and no two layers are one kernel. Errors: as [`Scheduler::step`].
    pub fn profile(&mut self) -> Result<Option<Profile>> {
        self.timed = Some(Profile::default());
        let went_on = self.step();
        let timed = self.timed.take();
        Ok(went_on?.then_some(timed).flatten())
    }
}

// update
